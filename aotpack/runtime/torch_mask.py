"""torch's own ``BlockMask`` where a mask of ours is expected."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import InputError, UnsupportedError
from aotpack.masks import Lengths
from aotpack.runtime.mask import BlockMask

__all__ = ["adopt", "is_torch_block_mask"]

_BLOCK: Final = 128


def is_torch_block_mask(mask: object) -> bool:
    """By name: importing torch's class would import ``torch._dynamo`` (torch 2.11)."""
    kind = type(mask)
    return kind.__name__ == "BlockMask" and kind.__module__ == "torch.nn.attention.flex_attention"


def adopt(mask: Any, device: torch.device) -> BlockMask:
    """A torch ``BlockMask`` [B or 1, 1, Q, KV] as ours; its ``mask_mod`` is called on the partial blocks.

    Raises:
        InputError: another block size, or a mask that differs between heads.
        UnsupportedError: on a device whose programs evaluate the mask themselves.
    """
    if device.type != "cpu":
        raise UnsupportedError(
            "a torch BlockMask is taken on the CPU only", remedy="make the mask with block_mask"
        )
    if tuple(mask.BLOCK_SIZE) != (_BLOCK, _BLOCK):
        raise InputError(
            "the BlockMask has another block size",
            expected=(_BLOCK, _BLOCK),
            found=tuple(mask.BLOCK_SIZE),
            remedy="create it with BLOCK_SIZE=128",
        )
    if mask.kv_num_blocks.dim() != 3 or mask.kv_num_blocks.shape[1] != 1:
        raise InputError(
            "the BlockMask differs between heads",
            expected="[B, 1, rows]",
            found=list(mask.kv_num_blocks.shape),
            remedy="create it with H=None",
        )
    query, key = mask.seq_lengths
    lists = _lists(mask)
    lengths = Lengths(batch=lists[0].shape[0], query=query, key=key)
    tiles, ids = _tiles(mask.mask_mod, lists[0], lists[1], lengths)
    return BlockMask(spec=None, lengths=lengths, tensors=(*lists, tiles, ids))


def _lists(mask: Any) -> list[Tensor]:
    lists = []
    for num, indices in (("kv_num_blocks", "kv_indices"), ("q_num_blocks", "q_indices")):
        for prefix in ("", "full_"):
            counts, places = getattr(mask, prefix + num), getattr(mask, prefix + indices)
            if counts is None:
                counts = torch.zeros_like(getattr(mask, num))
                places = torch.zeros_like(getattr(mask, indices))
            lists += [counts.to(torch.int32).contiguous(), places.to(torch.int32).contiguous()]
    return lists


def _tiles(mask_mod: Any, counts: Tensor, indices: Tensor, lengths: Lengths) -> tuple[Tensor, Tensor]:
    listed = torch.arange(indices.shape[-1]) < counts.unsqueeze(-1)
    partial = torch.zeros_like(listed).scatter(-1, indices.long(), listed)
    at = torch.nonzero(partial.squeeze(1))
    inside = torch.arange(_BLOCK)
    b = at[:, 0].view(-1, 1, 1)
    q = (at[:, 1].unsqueeze(-1) * _BLOCK + inside).unsqueeze(-1)
    kv = (at[:, 2].unsqueeze(-1) * _BLOCK + inside).unsqueeze(-2)
    within = (q < lengths.query) & (kv < lengths.key)
    # Cells outside the axes are hidden, whatever the rule says; the clamp keeps its gathers in range.
    visible = mask_mod(b, torch.zeros_like(b), q.clamp(max=lengths.query - 1), kv.clamp(max=lengths.key - 1))
    tiles = (visible & within).expand(-1, _BLOCK, _BLOCK).contiguous()
    ids = partial.reshape(-1).to(torch.int32).cumsum(0, dtype=torch.int32) - 1
    return tiles, ids.view(partial.shape)
