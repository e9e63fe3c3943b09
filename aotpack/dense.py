"""Dense attention math: the reference that packages are checked against, and the eager fallback."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["dense_attention", "relative_error"]


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    scale: float,
    *,
    modify: Callable[[Tensor], Tensor] | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over visible cells, in the inputs' own precision; differentiable.

    Args:
        q: [B,H,Q,D].
        k: [B,Hk,KV,D]; H is a multiple of Hk.
        v: [B,Hk,KV,Dv].
        visible: bool, broadcastable to [B,H,Q,KV].
        scale: factor of the scores.
        modify: changes the scaled scores [B,H,Q,KV].
        sinks: [H], a logit that joins the denominator of every row that is not empty.

    Returns:
        out [B,H,Q,Dv] and the natural log-sum-exp [B,H,Q]. A row without a visible cell has out 0, lse
        -inf and gradients 0.
    """
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = q @ k.mT * scale
    scores = (scores if modify is None else modify(scores)).masked_fill(~visible, -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    empty = top == -math.inf
    top = torch.where(empty, 0, top)
    if sinks is not None:
        top = torch.maximum(top, sinks.detach().view(-1, 1, 1))
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.view(-1, 1, 1) - top).exp()
    # The inner where keeps log and the division away from 0, whose gradients would be NaN.
    safe = torch.where(empty, 1, total)
    lse = torch.where(empty, -math.inf, top + safe.log()).squeeze(-1)
    return (weights / safe).to(v.dtype) @ v, lse


def relative_error(found: Tensor, exact: Tensor) -> float:
    """``||found - exact|| / ||exact||`` over the finite exact values, in the tensors' own precision.

    Infinite unless the shapes are equal and the other values exactly as they are; NaN where a value is.
    """
    finite = exact.isfinite()
    if found.shape != exact.shape or not bool((found[~finite] == exact[~finite]).all()):
        return math.inf
    found, exact = found[finite], exact[finite]
    return float((found - exact).norm() / exact.norm().clamp(min=torch.finfo(torch.float64).tiny))
