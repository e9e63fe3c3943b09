"""The three programs of a variant as modules for torch.export, with example inputs and dynamic lengths.

Program inputs and outputs are tensors only: a length that no tensor's shape gives is passed as the size of
a length carrier, an int8 tensor without storage of its own whose values nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.build.blocks import (
    BLOCK,
    MASK_TENSORS,
    classify,
    lists,
    mask_arguments,
    mask_lengths,
    packed,
)
from aotpack.build.ops import block_sparse_attention, interval_block_mask
from aotpack.masks import Lengths, family_of, inside, intervals
from aotpack.scores import family_of as family_of_score
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["TILE_TENSORS", "Program", "attention_program", "block_mask_program"]

TILE_TENSORS: Final = ("tiles", "tile_ids")
_EXAMPLE: Final = Lengths(batch=3, query=768, key=1152)
# Example sizes of axes that are a rule's own: none may equal another axis's.
_FREE: Final = 101


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
    """Counts and indices of partial and full blocks by row and by column, and the partial blocks' cells.

    The cells are bits, see ``blocks.packed``: nothing that the program holds is larger than a grid of blocks
    or 2 KiB for each partial block.
    """

    def __init__(self, mask: MaskSpec) -> None:
        super().__init__()
        self.mask = mask
        self.family = family_of(mask)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        inputs, lengths = mask_lengths(self.family, self.mask, args)
        rule = inside(self.family.rule(self.mask, inputs, lengths), lengths)
        partial, full = classify(rule, lengths, torch.int64)
        at = torch.nonzero(partial)
        b, q_block, kv_block = (at[:, i] for i in range(3))
        tiles = packed(rule, b, q_block, kv_block)
        ids = partial.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32) - 1
        return (*lists(partial, full), tiles, ids.view(partial.shape).unsqueeze(1))


class _IntervalBlockMask(torch.nn.Module):
    """The same for a mask whose rows see intervals: no cell is looked at that is not in a partial block."""

    def __init__(self, mask: MaskSpec) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        inputs, lengths = mask_lengths(family_of(self.mask), self.mask, args)
        ends = intervals(self.mask, inputs, lengths)
        assert ends is not None
        result: tuple[Tensor, ...] = interval_block_mask(*ends, lengths.key)
        return result


def block_mask_program(spec: AttentionSpec) -> Program:
    """Inputs: the family's tensors, then the length carriers; outputs: block lists and partial tiles."""
    family, query = family_of(spec.mask), _EXAMPLE.query
    # Not once the query axis: a size of 1 would be taken for granted.
    key = 3 * query if family.unrolled else _EXAMPLE.key
    sizes = {"B": _EXAMPLE.batch, "N": query // spec.mask.draft_size, "T": key - query, "Q": query, "K": key}
    for given in family.inputs:
        for axis in given.dims:
            sizes.setdefault(str(axis), _FREE + len(sizes))
    arguments = mask_arguments(spec.mask, sizes)
    return Program(
        module=(_IntervalBlockMask if family.intervals else _BlockMask)(spec.mask),
        args=arguments.tensors,
        dynamic_shapes=tuple(
            {i: torch.export.Dim.DYNAMIC for i, axis in enumerate(axes) if isinstance(axis, str)}
            for axes in arguments.axes
        ),
        inputs=arguments.names,
        outputs=MASK_TENSORS + TILE_TENSORS,
    )


class _BlockSparseAttention(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        taken = args[: 3 + len(MASK_TENSORS + TILE_TENSORS)]
        result: tuple[Tensor, Tensor] = block_sparse_attention(*taken, self.scale)
        return result


def attention_program(spec: AttentionSpec) -> Program:
    """Inputs q, k, v, the block mask's tensors and a score's sinks, which nobody reads (``sinks.py``).

    Outputs out and log-sum-exp, both differentiable.
    """
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
    shapes: list[dict[int, Any]] = [{0: dynamic, 2: dynamic}] * 3
    shapes += [{0: dynamic, **dict.fromkeys(range(2, arg.dim()), dynamic)} for arg in args[3:]]
    args.append(torch.zeros(7, BLOCK, BLOCK // 8, dtype=torch.uint8))
    shapes.append({0: dynamic})
    args.append(torch.zeros(size.batch, 1, q_blocks, kv_blocks, dtype=torch.int32))
    shapes.append({0: dynamic, 2: dynamic, 3: dynamic})
    sinks = () if spec.score is None else family_of_score(spec.score).inputs
    args += [torch.zeros(spec.heads) for _ in sinks]
    shapes += [{} for _ in sinks]
    return Program(
        module=_BlockSparseAttention(spec.scale),
        args=tuple(args),
        dynamic_shapes=tuple(shapes),
        inputs=(
            *("q", "k", "v", *(f"mask.{name}" for name in MASK_TENSORS + TILE_TENSORS)),
            *(f"score.{given.name}" for given in sinks),
        ),
        outputs=("out", "lse"),
    )
