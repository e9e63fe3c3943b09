"""Lists of blocks of any size, with a rule for their cells, as the 128x128 blocks that CPU programs take.

A cell is visible when its block is listed full, or listed partial and the rule says so. Everything held is as
large as a list of blocks, or as the cells of ``_AT_ONCE`` blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from aotpack.masks import Lengths

__all__ = ["BLOCK", "Cells", "Grid", "dense_cells", "reblock"]

BLOCK: Final = 128
_AT_ONCE: Final = 32

Cells = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``cells(b, q, kv, asked)``: which of the cells ``asked``, bool [n,128,128], are visible in batch entry
``b``; ``q`` and ``kv`` are int64 [n,128], indices inside the axes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """The listed blocks of one batch entry: bool [rows, columns] each, ``True`` where a block is listed."""

    partial: Tensor
    full: Tensor


def reblock(
    grids: Iterable[Grid], size: tuple[int, int], lengths: Lengths, cells: Cells
) -> tuple[Tensor, ...]:
    """The tensors of a CPU block mask: the eight lists, then tiles and tile ids.

    A block whose cells are all visible is listed full and one without any is not listed, whatever the grids
    call them.

    Args:
        grids: for each batch entry of ``lengths``.
        size: of the grids' blocks, in query rows and key columns.
        lengths: of the mask.
        cells: the rule of partial blocks.
    """
    shape = (lengths.batch, -(-lengths.query // BLOCK), -(-lengths.key // BLOCK))
    partial, full = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    tiles = []
    for b, grid in enumerate(grids):
        full[b], mixed = _classify(grid, size, lengths)
        places = mixed.nonzero()
        # One allocation: small ones that stay, between large ones that go, would scatter over the heap.
        packed = torch.empty(len(places), BLOCK, BLOCK // 8, dtype=torch.uint8)
        for at, bits in zip(places.split(_AT_ONCE), packed.split(_AT_ONCE), strict=True):
            visible = _visible(b, at, grid, size, lengths, cells)
            count = visible.sum((-2, -1), dtype=torch.int32)
            partial[b][at[:, 0], at[:, 1]] = (count > 0) & (count < BLOCK * BLOCK)
            full[b][at[:, 0], at[:, 1]] = count == BLOCK * BLOCK
            bits.copy_(_packed(visible))
        tiles.append(packed[partial[b][places[:, 0], places[:, 1]]])
    ids = partial.reshape(-1).cumsum(0, dtype=torch.int32) - 1
    lists = [
        tensor for blocks in (partial, full, partial.mT, full.mT) for tensor in _ordered(blocks.unsqueeze(1))
    ]
    return (*lists, torch.cat(tiles), ids.view(partial.shape).unsqueeze(1))


def dense_cells(tensors: tuple[Tensor, ...], lengths: Lengths) -> Tensor:
    """Every cell of a CPU block mask, bool [batch,1,query,key]: for the eager fallback, which is dense."""
    *lists, tiles, ids = tensors
    rows, columns = ids.shape[2:]
    grid = torch.zeros(lengths.batch, rows, columns, BLOCK, BLOCK, dtype=torch.bool)
    full = _listed(lists[2], lists[3]).squeeze(1)
    partial = _listed(lists[0], lists[1]).squeeze(1)
    bits = tiles.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    grid[full] = True
    grid[partial] = bits.flatten(-2).bool()[ids.squeeze(1)[partial].long()]
    cells = grid.transpose(2, 3).reshape(lengths.batch, 1, rows * BLOCK, columns * BLOCK)
    return cells[:, :, : lengths.query, : lengths.key]


def _listed(count: Tensor, indices: Tensor) -> Tensor:
    listed = torch.arange(indices.shape[-1]) < count.unsqueeze(-1)
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)


def _classify(grid: Grid, size: tuple[int, int], lengths: Lengths) -> tuple[Tensor, Tensor]:
    """Which 128x128 blocks are visible as a whole by the lists alone, and whose cells must be looked at."""
    rows, columns = _spans(lengths.query, size[0]), _spans(lengths.key, size[1])
    full = _sums(grid.full, rows, columns)
    covered = (rows[1] - rows[0]).unsqueeze(1) * (columns[1] - columns[0])
    inside = (_ends(lengths.query) <= lengths.query).unsqueeze(1) & (_ends(lengths.key) <= lengths.key)
    whole = (full == covered) & inside
    return whole, ((full > 0) | (_sums(grid.partial, rows, columns) > 0)) & ~whole


def _ends(length: int) -> Tensor:
    return torch.arange(BLOCK, length + BLOCK, BLOCK)


def _spans(length: int, size: int) -> tuple[Tensor, Tensor]:
    """For each 128 cells of an axis the first block of ``size`` that they touch, and the end of the last."""
    ends = _ends(length)
    return (ends - BLOCK) // size, (ends.clamp(max=length) - 1) // size + 1


def _sums(grid: Tensor, rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]) -> Tensor:
    """How many blocks of each span of rows and columns are set: int32."""
    down = torch.nn.functional.pad(grid.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    across = (down[rows[1]] - down[rows[0]]).cumsum(1, dtype=torch.int32)
    across = torch.nn.functional.pad(across, (1, 0))
    return across[:, columns[1]] - across[:, columns[0]]


def _visible(b: int, at: Tensor, grid: Grid, size: tuple[int, int], lengths: Lengths, cells: Cells) -> Tensor:
    """The cells of the blocks ``at``, int64 [n,2]: bool [n,128,128]."""
    q, kv = (at[:, axis : axis + 1] * BLOCK + torch.arange(BLOCK) for axis in (0, 1))
    within = (q < lengths.query).unsqueeze(2) & (kv < lengths.key).unsqueeze(1)
    # Cells outside the axes are hidden, whatever the rule says; the clamp keeps its gathers in range.
    q, kv = q.clamp(max=lengths.query - 1), kv.clamp(max=lengths.key - 1)
    row, column = (q // size[0]).unsqueeze(2), (kv // size[1]).unsqueeze(1)
    visible, asked = grid.full[row, column], grid.partial[row, column]
    if bool(asked.any()):
        visible = visible | cells(b, q, kv, asked)
    return visible & within


def _packed(cells: Tensor) -> Tensor:
    """Bits of cells: column ``j`` is bit ``j % 8``, from the least significant, of byte ``j // 8``."""
    bits = cells.unflatten(-1, (BLOCK // 8, 8)).to(torch.uint8) << torch.arange(8, dtype=torch.uint8)
    packed: Tensor = bits.sum(-1, dtype=torch.uint8)
    return packed


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts [B,1,rows] and indices [B,1,rows,columns]: the set columns first, then the others, ascending."""
    order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32).contiguous(), order.to(torch.int32).contiguous()
