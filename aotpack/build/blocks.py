"""Block masks as tensor functions that torch.export traces: the 128x128 blocks that a rule fills."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from aotpack.masks import Family, Lengths, Rule, Size, family_of
from aotpack.spec import MaskSpec
from aotpack.spec.tensors import shape_of

__all__ = [
    "BLOCK",
    "MASK_TENSORS",
    "MaskArguments",
    "cells",
    "classify",
    "lists",
    "mask_arguments",
    "mask_lengths",
    "packed",
]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskArguments:
    """Example tensors of a block-mask program, their names, and for each the axes of its dimensions.

    Axes are those of ``aotpack.spec.TensorInput``; a length carrier has the axis that it measures.
    """

    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]
    axes: tuple[tuple[str | int, ...], ...]


def mask_arguments(mask: MaskSpec, sizes: Mapping[str, int]) -> MaskArguments:
    """The family's tensors, then the length carriers."""
    family = family_of(mask)

    return MaskArguments(
        tensors=(
            *(torch.ones(shape_of(given.dims, sizes), dtype=given.dtype) for given in family.inputs),
            *(torch.empty(1, dtype=torch.int8).expand(sizes[axis]) for axis in family.carried),
        ),
        names=(*(given.name for given in family.inputs), *family.carriers),
        axes=(*(given.dims for given in family.inputs), *((axis,) for axis in family.carried)),
    )


def mask_lengths(
    family: Family, mask: MaskSpec, args: Sequence[Tensor]
) -> tuple[Mapping[str, Tensor], Lengths]:
    """The rule's inputs and lengths from a block-mask program's arguments."""
    inputs = {given.name: tensor for given, tensor in zip(family.inputs, args, strict=False)}
    sizes: dict[str | int, Size] = {}
    for given in family.inputs:
        sizes.update(zip(given.dims, inputs[given.name].shape, strict=True))
    carriers = args[len(family.inputs) :]
    sizes.update((axis, tensor.shape[0]) for axis, tensor in zip(family.carried, carriers, strict=True))
    return inputs, family.lengths(mask, sizes)


def cells(block: Tensor) -> Tensor:
    """Indices of the cells of blocks: one more dimension, of size 128."""
    return block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, dtype=block.dtype)


def classify(rule: Rule, lengths: Lengths, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Which blocks are visible in part and which as a whole: bool [B, query blocks, key blocks] each.

    ``dtype`` is the cell indices'.
    """
    shape = (lengths.batch, -(-lengths.query // BLOCK), -(-lengths.key // BLOCK))
    b = torch.arange(shape[0], dtype=dtype).view(-1, 1, 1, 1, 1)
    q, kv = (cells(torch.arange(size, dtype=dtype)) for size in shape[1:])
    visible = rule(b, q.unsqueeze(1).unsqueeze(-1), kv.unsqueeze(-2))
    count = visible.expand(*shape, BLOCK, BLOCK).sum((-2, -1), dtype=torch.int32)
    full = count == BLOCK * BLOCK
    return (count > 0) & ~full, full


def packed(rule: Rule, b: Tensor, q_block: Tensor, kv_block: Tensor) -> Tensor:
    """The cells of P blocks as bits: uint8 [P,128,16].

    The cell of row ``i`` and column ``j`` is bit ``j % 8``, counted from the least significant, of byte
    ``[i, j // 8]``.

    Args:
        rule: hides cells outside the axes.
        b: int64 [P], batch entries.
        q_block: int64 [P], rows of blocks.
        kv_block: int64 [P], columns of blocks.
    """
    q, kv = cells(q_block)[:, :, None, None], cells(kv_block).unflatten(-1, (BLOCK // 8, 8)).unsqueeze(1)
    visible = rule(b.view(-1, 1, 1, 1), q, kv).expand(-1, BLOCK, BLOCK // 8, 8)
    bit = torch.ones(8, dtype=torch.uint8) << torch.arange(8, dtype=torch.uint8)
    return (visible * bit).sum(-1, dtype=torch.uint8)


def lists(partial: Tensor, full: Tensor) -> tuple[Tensor, ...]:
    """The tensors of ``MASK_TENSORS``: counts and indices by row, then by column."""
    columns = (partial.transpose(1, 2).contiguous(), full.transpose(1, 2).contiguous())
    return tuple(tensor for blocks in (partial, full, *columns) for tensor in _ordered(blocks))


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [B,1,rows] and indices [B,1,rows,columns]: the set columns first, then the others, ascending."""
    set_so_far = blocks.to(torch.int32).cumsum(-1)
    unset_so_far = (~blocks).to(torch.int32).cumsum(-1)
    count = blocks.sum(-1, dtype=torch.int32)
    place = torch.where(blocks, set_so_far - 1, count.unsqueeze(-1) + unset_so_far - 1)
    column = torch.arange(blocks.shape[-1], dtype=torch.int32).expand(blocks.shape).contiguous()
    indices = torch.zeros_like(column).scatter(-1, place, column)
    return count.unsqueeze(1), indices.unsqueeze(1)
