"""One attention on one device: its block mask and its differentiable, thread-safe call."""

from __future__ import annotations

from typing import Any, Final, Literal, overload

import torch
from torch import Tensor

from aotpack.dense import dense_attention
from aotpack.masks import Lengths, dense, family_of
from aotpack.runtime.checks import check_anchors, check_inputs, check_mask, check_qkv
from aotpack.runtime.mask import BlockMask
from aotpack.runtime.operator import attention, enroll
from aotpack.runtime.programs import CompiledPrograms
from aotpack.runtime.reblock import dense_cells
from aotpack.runtime.torch_mask import adopt, is_torch_block_mask
from aotpack.spec import AttentionSpec

__all__ = ["Attention"]

_DTYPES: Final = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class Attention:
    """The attention of one spec on one device; ``Pack.attention`` makes it.

    Thread-safe, and one for all layers and threads of a device.

    Attributes:
        name: of the spec in its package.
        spec: what was compiled.
        device: where its tensors must be.
        compiled: False for the eager fallback, which is dense math.
    """

    def __init__(
        self, name: str, spec: AttentionSpec, device: torch.device, programs: CompiledPrograms | None
    ) -> None:
        self.name = name
        self.spec = spec
        self.device = device
        self.compiled = programs is not None
        self._family = family_of(spec.mask)
        self._dtype = _DTYPES[spec.dtype]
        self._programs = programs
        self._key = enroll(programs) if programs is not None else 0

    def __repr__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"<aotpack attention {self.name!r} on {self.device}, {how}: {self.spec.to_json()}>"

    def block_mask(
        self,
        *,
        anchors: Tensor | None = None,
        keep: Tensor | None = None,
        document_ids: Tensor | None = None,
        query_len: int | None = None,
        context_len: int | None = None,
        check: bool | None = None,
    ) -> BlockMask:
        """The mask of one step, for all layers that share it.

        Which arguments a mask family takes:

        - ``dflash``: anchors, keep, context_len. The query length is N * block_size, the key length
          context_len + N * block_size.
        - ``dflash-speculators``: document_ids, anchors, context_len (T).
        - ``causal``, ``full``: query_len and context_len, the key length.

        Args:
            anchors: int64, [B,N] (speculators: [N]); position of each block's anchor in the context.
            keep: bool [B,N]; False empties a block's rows.
            document_ids: int64 [T]; -1 is padding.
            query_len: query rows, in tokens.
            context_len: context, in tokens.
            check: whether anchors are checked to be inside the context, which reads their values; by
                default on the CPU only, because on a GPU it would wait for the device.

        Raises:
            InputError: arguments that do not fit the mask family or each other.
        """
        inputs = {"anchors": anchors, "keep": keep, "document_ids": document_ids}
        given_lengths = {"query_len": query_len, "context_len": context_len}
        check_inputs(self._family, self.spec.mask, self.device, inputs, given_lengths)
        tensors = {given.name: inputs[given.name].contiguous() for given in self._family.inputs}  # type: ignore[union-attr]
        lengths = self._lengths(tensors, query_len, context_len or 0)
        if check if check is not None else self.device.type == "cpu":
            check_anchors(tensors, lengths)
        if self._programs is None:
            visible = dense(self.spec.mask, tensors, lengths)
            return BlockMask(spec=self.spec.mask, lengths=lengths, tensors=(), dense=visible.to(self.device))
        found = self._programs.block_mask([*tensors.values(), *self._carriers(lengths)], lengths)
        return BlockMask(spec=self.spec.mask, lengths=lengths, tensors=tuple(found))

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, return_lse: Literal[False] = ...
    ) -> Tensor: ...
    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, return_lse: Literal[True]
    ) -> tuple[Tensor, Tensor]: ...
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over the mask's visible cells; differentiable in q, k and v.

        Args:
            q: [B,heads,Q,head_dim], of the spec's dtype; under autocast to that dtype, of any.
            k: [B,kv_heads,KV,head_dim].
            v: [B,kv_heads,KV,value_dim].
            mask: from ``block_mask``, or on the CPU a torch ``BlockMask`` of any block size.
            return_lse: also return the natural log-sum-exp of the scaled scores.

        Returns:
            out [B,heads,Q,value_dim] in the spec's dtype and, if asked, lse [B,heads,Q] float32. An empty
            row has out 0, lse -inf and gradients 0.

        Raises:
            InputError: tensors that do not fit the spec or the mask.
            UnsupportedError: a second derivative.
        """
        if torch.is_autocast_enabled(self.device.type) and (
            torch.get_autocast_dtype(self.device.type) == self._dtype
        ):
            q, k, v = q.to(self._dtype), k.to(self._dtype), v.to(self._dtype)
        check_qkv(self.spec, self.device, q, k, v)
        block_mask = adopt(mask, q, k) if is_torch_block_mask(mask) else mask
        check_mask(self.spec, self.device, q, k, block_mask)
        if self._programs is None:
            out, lse = self._eager(q, k, v, block_mask)
        else:
            out, lse = attention(self._key, q, k, v, self.mask_tensors(block_mask, q.shape[0]))
        return (out, lse) if return_lse else out

    def mask_tensors(self, mask: BlockMask, batch: int) -> list[Tensor]:
        """What the programs take of a mask, for that many batch entries."""
        # CUDA kernels index a batched family's mask by the batch entry; the CPU's may share one.
        if self.device.type == "cpu" or not self._family.batched or mask.lengths.batch == batch:
            return list(mask.tensors)
        return [tensor.expand(batch, *tensor.shape[1:]).contiguous() for tensor in mask.tensors]

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
        visible = dense_cells(mask.tensors, mask.lengths) if mask.dense is None else mask.dense
        out, lse = dense_attention(q.float(), k.float(), v.float(), visible, self.spec.scale)
        return out.to(self._dtype), lse

    def _lengths(self, inputs: dict[str, Tensor], query_len: int | None, context_len: int) -> Lengths:
        if not self._family.drafts:
            return Lengths(batch=1, query=query_len or 0, key=context_len)
        anchors = inputs["anchors"]
        query = anchors.shape[-1] * (self.spec.mask.block_size or 1)
        batch = anchors.shape[0] if self._family.batched else 1
        return Lengths(batch=batch, query=query, key=context_len + query)

    def _carriers(self, lengths: Lengths) -> list[Tensor]:
        """Tensors whose sizes tell a program the lengths; they share one byte of storage."""
        byte = torch.empty(1, dtype=torch.int8, device=self.device)
        sizes = (lengths.key - lengths.query,) if self._family.drafts else (lengths.query, lengths.key)
        return [byte.expand(size) for size in sizes]
