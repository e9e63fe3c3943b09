"""Attention sinks after the fact: a row's sink joins a softmax that was computed without it.

With ``l`` the log-sum-exp of a row's cells and ``s`` its sink, the row's output is multiplied by
``sigmoid(l - s)`` and its log-sum-exp becomes ``logaddexp(l, s)``. The sink is one more column with value 0,
so the gradients of q, k and v are attention's own backward, given the output and log-sum-exp that hold it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["join_sinks", "sinks_gradient"]


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out [B,H,Q,Dv] and lse [B,H,Q] with sinks [H] in them; empty rows stay as they are."""
    logits, empty = sinks.view(1, -1, 1), lse == -math.inf
    share = torch.sigmoid(lse - logits).unsqueeze(-1)
    joined = torch.where(empty, lse, torch.logaddexp(torch.where(empty, 0, lse), logits))
    return (out.float() * share).to(out.dtype), joined


def sinks_gradient(grad_out: Tensor, grad_lse: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Gradient [H] of the sinks; ``out`` and ``lse`` hold them. Empty rows add nothing."""
    empty = lse == -math.inf
    share = torch.exp(sinks.view(1, -1, 1) - torch.where(empty, 0, lse))
    slope = grad_lse - (grad_out.float() * out.float()).sum(-1)
    # Rows first: one sum for each batch entry and head, whatever the number of threads.
    return torch.where(empty, 0, share * slope).sum(-1).sum(0)
