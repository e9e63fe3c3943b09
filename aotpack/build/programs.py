"""The three programs of a variant as modules for torch.export, with example inputs and dynamic lengths.

Program inputs and outputs are tensors only: a length that no tensor's shape gives is passed as the size of
a length carrier, an int8 tensor without storage of its own whose values nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.build.ops import block_sparse_attention
from aotpack.masks import Family, Lengths, Rule, family_of
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["BLOCK", "MASK_TENSORS", "TILE_TENSORS", "Program", "attention_program", "block_mask_program"]

BLOCK: Final = 128
MASK_TENSORS: Final = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
)
TILE_TENSORS: Final = ("tiles", "tile_ids")
_EXAMPLE: Final = Lengths(batch=3, query=768, key=1152)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A module with what torch.export needs; every example dimension of size > 1 may be dynamic.

    ``inputs`` and ``outputs`` are the names of the calling convention, one for each tensor.
    """

    module: torch.nn.Module
    args: tuple[Tensor, ...]
    dynamic_shapes: tuple[dict[int, Any], ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _BlockMask(torch.nn.Module):
    """Counts and indices of partial and full blocks by row and by column, and the partial blocks' cells."""

    def __init__(self, mask: MaskSpec) -> None:
        super().__init__()
        self.mask = mask
        self.family = family_of(mask)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        inputs, lengths = _lengths(self.family, self.mask, args)
        rule = _inside(self.family.rule(self.mask, inputs, lengths), lengths)
        q_blocks, kv_blocks = -(-lengths.query // BLOCK), -(-lengths.key // BLOCK)
        b = torch.arange(lengths.batch).view(-1, 1, 1, 1, 1)
        q, kv = _cells(torch.arange(q_blocks).view(-1, 1)), _cells(torch.arange(kv_blocks).view(-1))
        visible = rule(b, q.unsqueeze(-1), kv.unsqueeze(-2)).expand(
            lengths.batch, q_blocks, kv_blocks, BLOCK, BLOCK
        )
        count = visible.sum((-2, -1), dtype=torch.int32)
        full = count == BLOCK * BLOCK
        partial = (count > 0) & ~full
        columns = (partial.transpose(1, 2).contiguous(), full.transpose(1, 2).contiguous())
        lists = (*_ordered(partial), *_ordered(full), *_ordered(columns[0]), *_ordered(columns[1]))
        at = torch.nonzero(partial)
        b, q_block, kv_block = (at[:, i] for i in range(3))
        tiles = rule(b.view(-1, 1, 1), _cells(q_block).unsqueeze(-1), _cells(kv_block).unsqueeze(-2))
        ids = partial.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32) - 1
        return (*lists, tiles, ids.view(partial.shape).unsqueeze(1))


def _cells(block: Tensor) -> Tensor:
    return block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)


def _inside(rule: Rule, lengths: Lengths) -> Rule:
    """The rule with every cell outside the axes hidden: the last blocks of an axis may stand out."""
    return lambda b, q, kv: rule(b, q, kv) & (q < lengths.query) & (kv < lengths.key)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [B,1,rows] and indices [B,1,rows,columns]: the set columns first, then the others, ascending."""
    set_so_far = blocks.to(torch.int32).cumsum(-1)
    unset_so_far = (~blocks).to(torch.int32).cumsum(-1)
    count = blocks.sum(-1, dtype=torch.int32)
    place = torch.where(blocks, set_so_far - 1, count.unsqueeze(-1) + unset_so_far - 1)
    column = torch.arange(blocks.shape[-1], dtype=torch.int32).expand(blocks.shape).contiguous()
    indices = torch.zeros_like(column).scatter(-1, place, column)
    return count.unsqueeze(1), indices.unsqueeze(1)


def _lengths(family: Family, mask: MaskSpec, args: Sequence[Tensor]) -> tuple[Mapping[str, Tensor], Lengths]:
    inputs = {given.name: tensor for given, tensor in zip(family.inputs, args, strict=False)}
    carriers = args[len(family.inputs) :]
    batch = next((inputs[i.name].shape[i.dims.index("B")] for i in family.inputs if "B" in i.dims), 1)
    if not family.drafts:
        return inputs, Lengths(batch=batch, query=carriers[0].shape[0], key=carriers[1].shape[0])
    query = inputs["anchors"].shape[-1] * (mask.block_size or 1)
    return inputs, Lengths(batch=batch, query=query, key=carriers[0].shape[0] + query)


def block_mask_program(spec: AttentionSpec) -> Program:
    """Inputs: the family's tensors, then the length carriers; outputs: block lists and partial tiles."""
    family, dynamic = family_of(spec.mask), torch.export.Dim.DYNAMIC
    context = _EXAMPLE.key - _EXAMPLE.query
    sizes = {"B": _EXAMPLE.batch, "N": _EXAMPLE.query // (spec.mask.block_size or 1), "T": context}
    args = [torch.ones([sizes[d] for d in given.dims], dtype=given.dtype) for given in family.inputs]
    names = [given.name for given in family.inputs]
    carriers = {"context": context} if family.drafts else {"query": _EXAMPLE.query, "key": _EXAMPLE.key}
    for name, length in carriers.items():
        args.append(torch.empty(1, dtype=torch.int8).expand(length))
        names.append(f"length.{name}")
    return Program(
        module=_BlockMask(spec.mask),
        args=tuple(args),
        dynamic_shapes=tuple(dict.fromkeys(range(a.dim()), dynamic) for a in args),
        inputs=tuple(names),
        outputs=MASK_TENSORS + TILE_TENSORS,
    )


class _BlockSparseAttention(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = block_sparse_attention(*args, self.scale)
        return result


def attention_program(spec: AttentionSpec) -> Program:
    """Inputs q, k, v and the block mask's tensors; outputs out and log-sum-exp, both differentiable."""
    dynamic, size = torch.export.Dim.DYNAMIC, _EXAMPLE
    q_blocks, kv_blocks = size.query // BLOCK, size.key // BLOCK
    dtype = getattr(torch, spec.dtype)
    args = [
        torch.zeros(size.batch, spec.heads, size.query, spec.head_dim, dtype=dtype),
        torch.zeros(size.batch, spec.kv_heads, size.key, spec.head_dim, dtype=dtype),
        torch.zeros(size.batch, spec.kv_heads, size.key, spec.value_dim, dtype=dtype),
    ]
    for rows, columns in ((q_blocks, kv_blocks),) * 2 + ((kv_blocks, q_blocks),) * 2:
        args.append(torch.zeros(size.batch, 1, rows, dtype=torch.int32))
        args.append(torch.zeros(size.batch, 1, rows, columns, dtype=torch.int32))
    args.append(torch.zeros(7, BLOCK, BLOCK, dtype=torch.bool))
    args.append(torch.zeros(size.batch, 1, q_blocks, kv_blocks, dtype=torch.int32))
    shapes: list[dict[int, Any]] = [{0: dynamic, 2: dynamic}] * 3
    for arg in args[3:]:
        shapes.append({0: dynamic, **{i: dynamic for i in range(2, arg.dim()) if arg.shape[i] != BLOCK}})
    return Program(
        module=_BlockSparseAttention(spec.scale),
        args=tuple(args),
        dynamic_shapes=tuple(shapes),
        inputs=("q", "k", "v", *(f"mask.{name}" for name in MASK_TENSORS + TILE_TENSORS)),
        outputs=("out", "lse"),
    )
