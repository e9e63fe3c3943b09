"""Tile sizes of flex attention's kernels, as its ``kernel_options``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from aotpack.spec import AttentionSpec

__all__ = ["Tiles"]

_Options = Mapping[str, int]
_BACKWARD: Final = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
# Where Inductor's own outgrow the device: the 99 KiB of sm_86, sm_89 and sm_120, or large heads.
_SMALLER: Final[Mapping[str, Sequence[_Options]]] = {
    "forward": ({"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32}, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16}),
    "backward": (dict.fromkeys(_BACKWARD, 32), dict.fromkeys(_BACKWARD, 16)),
}


def _backward(m1: int, n1: int, m2: int, n2: int, *, warps: int, stages: int) -> _Options:
    sizes = dict(zip(_BACKWARD, (m1, n1, m2, n2), strict=True))
    return {**sizes, "bwd_num_warps": warps, "bwd_num_stages": stages}


# The fastest of 20 measured on an H200 with Qwen3-8B's heads: whole blocks, then any lengths.
_HOPPER_128: Final[Mapping[bool, Mapping[str, _Options]]] = {
    True: {"backward": _backward(64, 64, 64, 64, warps=4, stages=2)},
    False: {
        "forward": {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3},
        "backward": _backward(32, 64, 64, 64, warps=4, stages=2),
    },
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """A choice of tiles for each program, the preferred first; the smaller ones follow."""

    forward: tuple[_Options, ...]
    backward: tuple[_Options, ...]

    @classmethod
    def preferred(cls, spec: AttentionSpec, capability: tuple[int, int], *, whole: bool) -> Tiles:
        """Where nothing was measured, Inductor's own come first.

        Args:
            spec: what is compiled.
            capability: compute capability of the device.
            whole: whether all lengths are multiples of a block of the mask.
        """
        measured: Mapping[str, _Options] = {}
        if capability == (9, 0) and spec.head_dim == spec.value_dim == 128 and spec.dtype != "float32":
            measured = _HOPPER_128[whole]
        return cls(**{name: (measured.get(name, {}), *_SMALLER[name]) for name in ("forward", "backward")})

    @property
    def options(self) -> _Options:
        """For ``flex_attention``."""
        return {**self.forward[0], **self.backward[0]}

    def smaller(self, program: str) -> Tiles | None:
        """With smaller tiles for ``forward`` or ``backward``; None when there are none."""
        left = getattr(self, program)[1:]
        return replace(self, **{program: left}) if left else None
