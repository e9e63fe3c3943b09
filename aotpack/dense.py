"""Dense attention math: the reference that packages are checked against, and the eager fallback."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["dense_attention"]


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention over visible cells, in the inputs' own precision; differentiable.

    Args:
        q: [B,H,Q,D].
        k: [B,Hk,KV,D]; H is a multiple of Hk.
        v: [B,Hk,KV,Dv].
        visible: bool, broadcastable to [B,H,Q,KV].
        scale: factor of the scores.

    Returns:
        out [B,H,Q,Dv] and the natural log-sum-exp [B,H,Q]. A row without a visible cell has out 0, lse
        -inf and gradients 0.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~visible, -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0, top)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    # The inner where keeps log and the division away from 0, whose gradients would be NaN.
    empty = total == 0
    safe = torch.where(empty, 1, total)
    lse = torch.where(empty, -math.inf, top + safe.log()).squeeze(-1)
    return (weights / safe).to(v.dtype) @ v, lse
