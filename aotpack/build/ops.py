"""The CPU operators that programs are traced with; their kernels are the C++ files in cpu/.

They exist only in the build's own process and only as fakes: AOTInductor turns each call into a direct
call of the C function that is linked into the program's library.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from aotpack.build.blocks import BLOCK

__all__ = ["C_SHIMS", "block_sparse_attention", "interval_block_mask"]

_BY_Q: Final = "Tensor kv_num, Tensor kv_idx, Tensor full_kv_num, Tensor full_kv_idx"
_BY_KV: Final = "Tensor q_num, Tensor q_idx, Tensor full_q_num, Tensor full_q_idx"
_TILES: Final = "Tensor cells, Tensor ids"

_library: Final = torch.library.Library("aotpack_build", "DEF")
_library.define(
    f"block_sparse_attention(Tensor q, Tensor k, Tensor v, {_BY_Q}, {_BY_KV}, {_TILES}, float scale)"
    " -> (Tensor, Tensor)"
)
_library.define(
    f"block_sparse_forward(Tensor q, Tensor k, Tensor v, {_BY_Q}, {_TILES}, float scale) -> (Tensor, Tensor)"
)
_library.define(
    "block_sparse_backward(Tensor grad_out, Tensor grad_lse, "
    "Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{_BY_Q}, {_BY_KV}, {_TILES}, float scale) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    f"interval_block_mask(Tensor low, Tensor high, SymInt keys) -> ({', '.join(['Tensor'] * 10)})"
)

block_sparse_attention = torch.ops.aotpack_build.block_sparse_attention.default
_forward = torch.ops.aotpack_build.block_sparse_forward.default
_backward = torch.ops.aotpack_build.block_sparse_backward.default
# Low and high int64 [B,Q,n]: the lists of MASK_TENSORS, then tiles uint8 [P,128,16] and tile ids.
interval_block_mask = torch.ops.aotpack_build.interval_block_mask.default


def _declaration(name: str, tensors: int, outputs: int, number: str = "double") -> str:
    arguments = ["AtenTensorHandle"] * tensors + [number] + ["AtenTensorHandle*"] * outputs
    return f"AOTITorchError aoti_torch_cpu_{name}({', '.join(arguments)})"


C_SHIMS: Final[dict[Any, list[str]]] = {
    _forward: [_declaration("block_sparse_forward", 9, 2)],
    _backward: [_declaration("block_sparse_backward", 17, 3)],
    interval_block_mask: [_declaration("interval_block_mask", 2, 10, "int64_t")],
}


def _forward_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    return q.new_empty((batch, heads, rows, v.shape[3])), q.new_empty(
        (batch, heads, rows), dtype=torch.float32
    )


def _backward_fake(
    grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _block_mask_fake(low: Tensor, high: Tensor, keys: Any) -> tuple[Tensor, ...]:
    batch, rows, columns = low.shape[0], -(-low.shape[1] // BLOCK), -(-keys // BLOCK)
    lists = [
        low.new_empty(shape, dtype=torch.int32)
        for height, width in ((rows, columns), (columns, rows))
        for _ in range(2)
        for shape in ((batch, 1, height), (batch, 1, height, width))
    ]
    partial = torch.library.get_ctx().new_dynamic_size(min=0)
    tiles = low.new_empty((partial, BLOCK, BLOCK // 8), dtype=torch.uint8)
    return (*lists, tiles, low.new_empty((batch, 1, rows, columns), dtype=torch.int32))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, *mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(q, k, v, *mask[:4], *mask[8:], scale)
        ctx.save_for_backward(q, k, v, out, lse, *mask)
        ctx.scale = scale
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *mask = ctx.saved_tensors
        dq, dk, dv = _backward(grads[0], grads[1], q, k, v, out, lse, *mask, ctx.scale)
        return dq, dk, dv, None, *(None for _ in mask)


def _differentiable(*args: Any) -> tuple[Tensor, Tensor]:
    q, k, v, *mask, scale = args
    result: tuple[Tensor, Tensor] = _Attention.apply(q, k, v, scale, *mask)
    return result


torch.library.register_fake("aotpack_build::block_sparse_forward", _forward_fake, lib=_library)
torch.library.register_fake("aotpack_build::block_sparse_backward", _backward_fake, lib=_library)
torch.library.register_fake("aotpack_build::interval_block_mask", _block_mask_fake, lib=_library)
_library.impl("block_sparse_attention", _differentiable, "CompositeImplicitAutograd")
