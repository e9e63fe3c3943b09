"""Random steps of a trainer, and the dense fp64 math that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import aotpack
from aotpack.spec import AttentionSpec
from tests.masks_drawn import Draw, arguments_of, visible

# Of dense scores that are in memory at once.
ROWS = 128
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: tensors of the attention call and what its mask is made from."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    mask: dict[str, Any]

    @property
    def key_length(self) -> int:
        return self.k.shape[2]


def make_case(
    spec: AttentionSpec,
    batch: int,
    context: int,
    anchors: int,
    *,
    seed: int = 0,
    keep: float = 0.8,
    dtype: torch.dtype | None = None,
) -> Case:
    """A step of about these lengths, as far as the mask family lets them be chosen.

    Args:
        keep: the share of blocks that are kept; the others' rows are empty (family dflash).
        anchors: blocks of query rows; of families that do not draft, 16 rows each.
    """
    generator = torch.Generator().manual_seed(seed)
    size = spec.mask.draft_size
    rows = anchors * (size if size > 1 else 16)
    draw_of = Draw(mask=spec.mask, generator=generator, batch=batch, context=context, query=rows, keep=keep)
    arguments, query, key = arguments_of(spec.mask, draw_of)
    dtype = dtype or getattr(torch, spec.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Case(
        q=draw(batch, spec.heads, query, spec.head_dim),
        k=draw(batch, spec.kv_heads, key, spec.head_dim),
        v=draw(batch, spec.kv_heads, key, spec.value_dim),
        grad_out=draw(batch, spec.heads, query, spec.value_dim),
        grad_lse=torch.randn((batch, spec.heads, query), generator=generator),
        mask=arguments,
    )


def run(attention: aotpack.Attention, case: Case) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of the compiled attention."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (case.q, case.k, case.v))
    mask = attention.block_mask(**case.mask)
    out, lse = attention(q, k, v, mask, return_lse=True)
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), lse.detach(), q.grad, k.grad, v.grad


def visible_cells(spec: AttentionSpec, case: Case) -> Tensor:
    """bool [B,1,Q,KV], written from the rules' definitions, not from aotpack's masks."""
    return visible(spec.mask, case.mask, case.q.shape[2], case.key_length)


def exact(
    spec: AttentionSpec, case: Case, visible: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv by dense math in ``dtype``; empty rows are 0, -inf and 0."""
    # One key head of one batch entry at a time: dense scores of all would take gigabytes.
    batch, heads = case.q.shape[0], spec.kv_heads
    tensors = [t.to(dtype) for t in (case.q, case.k, case.v, case.grad_out, case.grad_lse)]
    parts = [
        _exact([t[b].unflatten(0, (heads, -1))[h] for t in tensors], visible[b % len(visible)], spec.scale)
        for b in range(batch)
        for h in range(heads)
    ]
    return tuple(
        torch.stack(part).unflatten(0, (batch, heads)).flatten(1, 2) for part in zip(*parts, strict=True)
    )


def _exact(tensors: list[Tensor], visible: Tensor, scale: float) -> tuple[Tensor, ...]:
    """The same of one key head: its queries [G,Q,D], k and v [1,KV,...], visible [1,Q,KV]."""
    q, k, v = (t.detach().requires_grad_() for t in tensors[:3])
    # float64 sums exactly enough to take few rows at a time; a narrow type's gradients are one sum, as ever.
    rows = ROWS if q.dtype == torch.float64 else q.shape[1]
    outs, sums = [], []
    for part, grad_out, grad_lse, seen in zip(
        *(t.split(rows, 1) for t in (q, *tensors[3:], visible)), strict=True
    ):
        scores = torch.where(seen, part @ k.transpose(-1, -2) * scale, -torch.inf)
        empty = ~seen.any(-1)
        probabilities = torch.where(empty[..., None], 0, scores).softmax(-1) * seen
        out = torch.where(empty[..., None], 0, probabilities @ v)
        lse = torch.where(empty, 0, torch.where(empty[..., None], 0, scores).logsumexp(-1))
        torch.autograd.backward([out, lse], [grad_out, torch.where(empty, 0, grad_lse)])
        outs.append(out.detach())
        sums.append(torch.where(empty, -torch.inf, lse).detach())
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return torch.cat(outs, 1), torch.cat(sums, 1), q.grad, k.grad, v.grad


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| over the finite cells; infinite cells must agree."""
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    difference = (found.double() - expected.double())[finite].norm()
    scale = expected.double()[finite].norm()
    return float(difference if scale == 0 else difference / scale)
