"""torch's own ``BlockMask`` where a mask of ours is expected.

Reads the attributes of ``BlockMask`` and calls its ``mask_mod`` as torch does, for one cell under
``torch.vmap``. Tried with torch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import InputError, UnsupportedError
from aotpack.masks import Lengths
from aotpack.runtime.mask import BlockMask
from aotpack.runtime.reblock import Cells, Grid, reblock

__all__ = ["adopt", "is_torch_block_mask"]

_INTEGERS: Final = (torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8)
_BATCH: Final = 0
_HEAD: Final = 1


def is_torch_block_mask(mask: object) -> bool:
    """By name: importing torch's class would import ``torch._dynamo`` (torch 2.11)."""
    kind = type(mask)
    return kind.__name__ == "BlockMask" and kind.__module__ == "torch.nn.attention.flex_attention"


@torch.no_grad()
def adopt(mask: Any, q: Tensor, k: Tensor) -> BlockMask:
    """A torch ``BlockMask`` as ours, of any block size.

    A cell is visible when its block is listed full, or listed partial and ``mask_mod`` says so. Only the
    lists by query are read (``kv_*``, ``full_kv_*``); those by key follow from them.

    Args:
        mask: [B or 1, heads or 1, Q, KV]; its heads must not differ.
        q: [B,heads,Q,head_dim] that it is for.
        k: [B,kv_heads,KV,head_dim] that it is for.

    Raises:
        InputError: a mask for other lengths or of several heads that differ, or lists that leave the grid.
        UnsupportedError: on a device whose programs evaluate the mask themselves.
    """
    if q.device.type != "cpu":
        raise UnsupportedError(
            "a torch BlockMask is taken on the CPU only: on other devices the mask's rule is compiled in",
            remedy="pass what block_mask of this attention returned; for another rule build a package "
            "whose spec has it",
        )
    size = _block_size(mask)
    _check_lists(mask, size, q, k)
    entries = mask.kv_num_blocks.shape[0]
    heads = 1
    if bool((mask.kv_num_blocks > 0).any()):
        # Lists of one entry are every entry's, but mask_mod is asked for each.
        entries = q.shape[0] if entries == 1 and _reads(mask.mask_mod, _BATCH) else entries
        heads = q.shape[1] if _reads(mask.mask_mod, _HEAD) else 1
    lengths = Lengths(batch=entries, query=q.shape[2], key=k.shape[2])
    tensors = reblock(_grids(mask, size, lengths), size, lengths, _cells(mask.mask_mod, heads))
    return BlockMask(spec=None, lengths=lengths, tensors=tensors)


def _block_size(mask: Any) -> tuple[int, int]:
    size = mask.BLOCK_SIZE
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or not all(isinstance(each, int) and each > 0 for each in pair):
        raise InputError("the BlockMask's BLOCK_SIZE is wrong", expected="two positive numbers", found=pair)
    return pair[0], pair[1]


def _check_lists(mask: Any, size: tuple[int, int], q: Tensor, k: Tensor) -> None:
    batch, heads, query, key = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if tuple(mask.seq_lengths) != (query, key):
        raise InputError(
            "the BlockMask was made for other lengths",
            expected=f"query length {query}, key length {key}",
            found=f"query length {mask.seq_lengths[0]}, key length {mask.seq_lengths[1]}",
            remedy="create it with Q_LEN and KV_LEN of q and k, or give from_kv_blocks their seq_lengths",
        )
    rows = -(-query // size[0])
    for counts, indices in _names(mask):
        count, index = getattr(mask, counts), getattr(mask, indices)
        for name, tensor in ((counts, count), (indices, index)):
            if tensor.device != q.device or tensor.dtype not in _INTEGERS:
                raise InputError(
                    f"the BlockMask's {name} is no list of blocks for this device",
                    expected=f"integers on {q.device}",
                    found=f"{tensor.dtype} on {tensor.device}",
                    remedy=f"create it with device='{q.device}'",
                )
        shape = tuple(count.shape)
        if (
            len(shape) != 3
            or shape[0] not in (1, batch)
            or shape[1] not in (1, heads)
            or shape[2] != rows
            or tuple(index.shape[:-1]) != shape
            or shape != tuple(mask.kv_num_blocks.shape)
        ):
            raise InputError(
                f"the BlockMask's {counts} and {indices} have the wrong shape",
                expected=f"[{batch} or 1, {heads} or 1, {rows}] and the same with one more axis",
                found=f"{list(shape)} and {list(index.shape)}",
                remedy="create it with B and H of q, or with None for either",
            )


def _names(mask: Any) -> list[tuple[str, str]]:
    partial, full = ("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")
    return [partial] if mask.full_kv_num_blocks is None else [partial, full]


def _grids(mask: Any, size: tuple[int, int], lengths: Lengths) -> Iterator[Grid]:
    columns = -(-lengths.key // size[1])
    entries, heads, rows = mask.kv_num_blocks.shape
    for b in range(lengths.batch):
        entry = b if entries > 1 else 0
        grids = []
        for counts, indices in _names(mask):
            count, index = getattr(mask, counts)[entry], getattr(mask, indices)[entry]
            first = _listed(count[0], index[0], columns, counts, indices)
            # An axis that was expanded holds one head.
            shared = count.stride(0) == 0 and index.stride(0) == 0
            for h in range(1, 1 if shared else heads):
                if not torch.equal(first, _listed(count[h], index[h], columns, counts, indices)):
                    raise _differs(h)
            grids.append(first)
        full = grids[1] if len(grids) > 1 else torch.zeros(rows, columns, dtype=torch.bool)
        yield Grid(partial=grids[0] & ~full, full=full)


def _listed(count: Tensor, index: Tensor, columns: int, counts: str, indices: str) -> Tensor:
    """bool [rows, columns] from counts [rows] and indices [rows, width]; those past a count mean nothing."""
    width = index.shape[-1]
    if bool(((count < 0) | (count > width)).any()):
        raise _outside(counts, f"from 0 to {width}, the length of a row of {indices}", count)
    listed = torch.arange(width) < count.unsqueeze(-1)
    named = index[listed]
    if bool(((named < 0) | (named >= columns)).any()):
        raise _outside(indices, f"blocks from 0 to {columns - 1}", named)
    row = torch.arange(index.shape[0]).repeat_interleave(count.long())
    grid = torch.zeros(index.shape[0], columns, dtype=torch.bool)
    grid[row, named.long()] = True
    return grid


def _outside(name: str, expected: str, found: Tensor) -> InputError:
    return InputError(
        f"the BlockMask's {name} leaves the grid of blocks",
        expected=expected,
        found=f"values from {int(found.min())} to {int(found.max())}",
        remedy="make the lists for the lengths of q and k and for its BLOCK_SIZE",
    )


def _differs(head: int) -> InputError:
    return InputError(
        "the BlockMask differs between heads",
        expected="one mask for all heads",
        found=f"another one for head {head} than for head 0",
        remedy="create it with H=None from a mask_mod that does not depend on h",
    )


def _reads(mask_mod: Any, argument: int) -> bool:
    """Whether a mask_mod's result may depend on one of its arguments."""
    args = [torch.zeros((), dtype=torch.int64)] * 4
    args[argument] = torch.zeros(2, dtype=torch.int64)
    dims = [0 if at == argument else None for at in range(4)]
    # vmap expands a result that it did not map, and an expanded axis has no stride.
    return bool(torch.vmap(mask_mod, in_dims=tuple(dims))(*args).stride(0) != 0)


def _cells(mask_mod: Any, heads: int) -> Cells:
    """The rule of partial blocks; asks for ``heads`` heads, which must agree."""
    over_kv = torch.vmap(mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_kv, in_dims=(None, None, 0, None))
    over_blocks = torch.vmap(over_q, in_dims=(None, None, 0, 0))

    def one_head(b: int, head: int, q: Tensor, kv: Tensor, asked: Tensor) -> Tensor:
        visible: Tensor = over_blocks(torch.tensor(b), torch.tensor(head), q, kv)
        if visible.dtype != torch.bool or visible.shape != asked.shape:
            raise InputError(
                "the BlockMask's mask_mod does not say whether a cell is visible",
                expected="one torch.bool for one b, h, q and kv",
                found=f"{visible.dtype} of shape {list(visible.shape[3:])}",
                remedy="return a comparison, or cast the result with .bool()",
            )
        return visible & asked

    def cells(b: int, q: Tensor, kv: Tensor, asked: Tensor) -> Tensor:
        first = one_head(b, 0, q, kv, asked)
        for head in range(1, heads):
            if not torch.equal(first, one_head(b, head, q, kv, asked)):
                raise _differs(head)
        return first

    return cells
