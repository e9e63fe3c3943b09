"""Dense evaluation of torch's mask and score functions, and of attention, independent of aotpack's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask


def cells(mask_mod: Callable[..., Any], batch: int, query: int, key: int) -> Tensor:
    """bool [B,1,Q,K], by torch's own evaluation cell by cell (vmap)."""
    return create_mask(mask_mod, batch, 1, query, key, device="cpu")


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, score_mod: Any = None
) -> tuple[Tensor, Tensor]:
    """out and lse in the tensors' dtype; rows without a visible cell are 0 and -inf."""
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k.repeat_interleave(group, 1)) * scale
    if score_mod is not None:
        b, h, m, n = torch.meshgrid(*(torch.arange(size) for size in scores.shape), indexing="ij")
        scores = score_mod(scores, b, h, m, n)
    if visible is not None:
        scores = torch.where(visible, scores, -torch.inf)
    empty = torch.isneginf(scores).all(-1)
    exponents = torch.where(empty[..., None], 0, scores)
    weights = torch.where(empty[..., None], 0, exponents.softmax(-1))
    lse = torch.where(empty, -torch.inf, exponents.logsumexp(-1))
    return weights @ v.repeat_interleave(group, 1), lse
