"""Checks of a call's arguments: each failure says what was expected, what was found and what to do."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from aotpack.errors import InputError
from aotpack.runtime.mask import BlockMask
from aotpack.spec import AttentionSpec

__all__ = ["QkvCheck", "check_mask"]

_REMEMBERED: Final = 4096


class QkvCheck:
    """Checks q [B,heads,Q,head_dim], k [B,kv_heads,KV,head_dim] and v [B,kv_heads,KV,value_dim].

    Args:
        spec: whose heads and sizes these are.
        dtype, device: of the tensors.
    """

    def __init__(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._spec, self._dtype, self._device = spec, dtype, device
        self._right: set[tuple[torch.Size, torch.Size, torch.Size]] = set()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, *, plain: bool) -> None:
        """Raises ``InputError`` where they do not fit.

        Args:
            q, k, v: to check.
            plain: their sizes are numbers, so that shapes that were right once need no second look.
        """
        if not plain:
            _check_qkv(self._spec, self._dtype, self._device, q, k, v)
            return
        shapes = (q.shape, k.shape, v.shape)
        if shapes in self._right and self._fit(q) and self._fit(k) and self._fit(v):
            return
        _check_qkv(self._spec, self._dtype, self._device, q, k, v)
        if len(self._right) >= _REMEMBERED:
            self._right.clear()
        self._right.add(shapes)

    def _fit(self, tensor: Tensor) -> bool:
        return tensor.dtype is self._dtype and tensor.device == self._device


def _check_qkv(
    spec: AttentionSpec, dtype: torch.dtype, device: torch.device, q: Tensor, k: Tensor, v: Tensor
) -> None:
    for name, tensor, heads, size in (
        ("q", q, spec.heads, spec.head_dim),
        ("k", k, spec.kv_heads, spec.head_dim),
        ("v", v, spec.kv_heads, spec.value_dim),
    ):
        shape = tensor.shape
        if len(shape) != 4 or shape[1] != heads or shape[3] != size:
            raise InputError(
                f"{name} has the wrong shape for this attention",
                expected=f"[batch, {heads}, length, {size}]",
                found=list(shape),
                remedy="reshape it, or load a package built for this model: pack.require(spec) compares",
            )
        _same_device(name, tensor, device)
        if tensor.dtype != dtype:
            raise InputError(
                f"{name} has the wrong dtype for this attention",
                expected=dtype,
                found=tensor.dtype,
                remedy=f"cast it, run under autocast to {spec.dtype}, or build a package of this dtype",
            )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0]:
        raise InputError(
            "q, k and v do not fit each other",
            expected="one batch size, and k and v of one length",
            found=f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            remedy="check how the keys and values were joined",
        )


def check_mask(spec: AttentionSpec, device: torch.device, q: Tensor, k: Tensor, mask: object) -> None:
    """The mask was made by this spec's rule, for these lengths and this batch, on this device."""
    if not isinstance(mask, BlockMask):
        raise InputError(
            "the mask is no block mask",
            expected="what block_mask returned, or a torch BlockMask",
            found=type(mask).__name__,
            remedy="call block_mask once a step and pass its result",
        )
    if mask.spec is not None and mask.spec is not spec.mask and mask.spec != spec.mask:
        raise InputError(
            "the mask was made by another rule",
            expected=spec.mask.to_dict(),
            found=mask.spec.to_dict(),
            remedy="make it with block_mask of the same attention",
        )
    batch, query, key = q.shape[0], q.shape[2], k.shape[2]
    lengths = mask.lengths
    if (lengths.query, lengths.key) != (query, key) or lengths.batch not in (1, batch):
        raise InputError(
            "the mask was made for other lengths",
            expected=f"batch {batch}, query length {query}, key length {key}",
            found=f"batch {lengths.batch}, query length {lengths.query}, key length {lengths.key}",
            remedy="make a new mask whenever the batch, the anchors or the context change",
        )
    for tensor in mask.tensors[:1]:
        _same_device("the mask", tensor, device)


def _same_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device:
        raise InputError(
            f"{name} is on another device than this attention",
            expected=device,
            found=tensor.device,
            remedy=f"move it, or take the attention of a pack loaded with device='{tensor.device}'",
        )
