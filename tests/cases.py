"""Random steps of a trainer, and the dense fp64 math that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import aotpack
from aotpack.spec import AttentionSpec

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
    """``keep`` is the share of blocks that are kept; the others' rows are empty (family dflash)."""
    generator = torch.Generator().manual_seed(seed)
    size = spec.mask.block_size or 16
    query = anchors * size
    key = context + query if spec.mask.block_size else context
    dtype = dtype or getattr(torch, spec.dtype)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return Case(
        q=draw(batch, spec.heads, query, spec.head_dim),
        k=draw(batch, spec.kv_heads, key, spec.head_dim),
        v=draw(batch, spec.kv_heads, key, spec.value_dim),
        grad_out=draw(batch, spec.heads, query, spec.value_dim),
        grad_lse=torch.randn((batch, spec.heads, query), generator=generator),
        mask=_mask_arguments(spec, batch, context, anchors, keep, generator),
    )


def _mask_arguments(
    spec: AttentionSpec, batch: int, context: int, anchors: int, keep: float, generator: torch.Generator
) -> dict[str, Any]:
    if spec.mask.family == "dflash":
        return {
            "anchors": torch.randint(0, context, (batch, anchors), generator=generator).sort(-1).values,
            "keep": torch.rand((batch, anchors), generator=generator) < keep,
            "context_len": context,
        }
    if spec.mask.family == "dflash-speculators":
        documents = torch.randint(0, 3, (context,), generator=generator).sort().values
        documents[-max(1, context // 10) :] = -1
        return {
            "anchors": torch.randint(0, context, (anchors,), generator=generator),
            "document_ids": documents,
            "context_len": context,
        }
    return {"query_len": anchors * 16, "context_len": context}


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
    mask, arguments = spec.mask, case.mask
    query, key = case.q.shape[2], case.key_length
    q, kv = torch.arange(query)[:, None], torch.arange(key)[None, :]
    if mask.family == "causal":
        return (kv <= q)[None, None]
    if mask.family == "full":
        return torch.ones(1, 1, query, key, dtype=torch.bool)
    context, size = key - query, mask.block_size
    assert size is not None
    entries = []
    anchors = arguments["anchors"] if arguments["anchors"].dim() == 2 else arguments["anchors"][None]
    for b in range(anchors.shape[0]):
        cells = torch.zeros(query, key, dtype=torch.bool)
        for n, anchor in enumerate(anchors[b].tolist()):
            for offset in range(size):
                row = cells[n * size + offset]
                if mask.family == "dflash":
                    if not arguments["keep"][b, n]:
                        continue
                    low = 0 if mask.window is None else max(0, anchor + offset - (mask.window - 1))
                    row[low:anchor] = True
                    end = size if mask.window is None else offset + 1
                else:
                    documents = arguments["document_ids"]
                    low = 0 if mask.window is None else max(0, anchor - mask.window)
                    same = (documents == documents[anchor]) & (documents[anchor] != -1)
                    row[:context] = same & (torch.arange(context) < anchor) & (torch.arange(context) >= low)
                    end = offset + 1 if mask.window is not None and mask.causal else size
                row[context + n * size : context + n * size + end] = True
        entries.append(cells)
    return torch.stack(entries)[:, None]


def exact(
    spec: AttentionSpec, case: Case, visible: Tensor, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv by dense math in ``dtype``; empty rows are 0, -inf and 0."""
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (case.q, case.k, case.v))
    group = spec.heads // spec.kv_heads
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * spec.scale
    scores = torch.where(visible, scores, -torch.inf)
    empty = ~visible.any(-1)
    probabilities = torch.where(empty[..., None], 0, scores).softmax(-1) * visible
    out = torch.where(empty[..., None], 0, probabilities @ v.repeat_interleave(group, 1))
    lse = torch.where(empty, 0, torch.where(empty[..., None], 0, scores).logsumexp(-1))
    weight = torch.where(empty, 0, case.grad_lse.to(dtype))
    torch.autograd.backward([out, lse], [case.grad_out.to(dtype), weight])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return out.detach(), torch.where(empty, -torch.inf, lse).detach(), q.grad, k.grad, v.grad


def relative_error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected|| over the finite cells; infinite cells must agree."""
    finite = expected.isfinite()
    assert torch.equal(found.isfinite(), finite)
    difference = (found.double() - expected.double())[finite].norm()
    scale = expected.double()[finite].norm()
    return float(difference if scale == 0 else difference / scale)
