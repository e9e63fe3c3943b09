"""Which kernels a variant's attention runs on; needs no torch."""

from __future__ import annotations

from typing import Final

from aotpack.spec import AttentionSpec
from aotpack.targets import Target

__all__ = ["has_kernels", "kernels_of"]

_HEAD_DIMS: Final = (64, 128)


def has_kernels(spec: AttentionSpec, capability: tuple[int, int]) -> bool:
    """Whether there are kernels of our own for such a spec and device; if not, torch's template is."""
    return (
        capability == (9, 0)
        and spec.mask.family == "dflash"
        and spec.score is None
        and spec.dtype in ("bfloat16", "float16")
        and spec.head_dim == spec.value_dim
        and spec.head_dim in _HEAD_DIMS
        and spec.scale > 0
    )


def kernels_of(spec: AttentionSpec, target: Target, *, template: bool) -> str:
    """One of ``aotpack.tuning.KERNELS``; with ``template``, torch's also where there are ours."""
    if target.capability is None:
        return "cpu"
    return "dflash" if not template and has_kernels(spec, target.capability) else "template"
