"""Random steps of a trainer, and the dense fp64 math that they are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import aotpack
from aotpack.spec import AttentionSpec, MaskSpec

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
    arguments, query, key = mask_arguments(
        spec.mask, batch, context, anchors * (size if size > 1 else 16), keep, generator
    )
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


def mask_arguments(
    mask: MaskSpec, batch: int, context: int, query: int, keep: float, generator: torch.Generator
) -> tuple[dict[str, Any], int, int]:
    """Arguments of ``block_mask``, the query length and the key length."""

    def whole(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    def documents(length: int) -> Tensor:
        ids = whole(0, 3, length).sort().values
        ids[length - length // 10 :] = -1
        return ids

    match mask.family:
        case "dflash":
            anchors = query // mask.draft_size
            arguments = {
                "anchors": whole(0, context, batch, anchors).sort(-1).values,
                "keep": torch.rand((batch, anchors), generator=generator) < keep,
                "context_len": context,
            }
            return arguments, query, context + query
        case "dflash-speculators":
            drawn = {
                "anchors": whole(0, context, query // mask.draft_size),
                "document_ids": documents(context),
            }
            return {**drawn, "context_len": context}, query, context + query
        case "eagle3":
            key = query * (1 + context // query)
            lengths = whole(0, query + 1, batch)
            return {"lengths": lengths, "query_len": query, "context_len": key}, query, key
        case "eagle3-speculators":
            key = query * (1 + context // query)
            return {"document_ids": documents(query), "context_len": key}, query, key
        case "peagle":
            groups = {"anchor_pos": whole(0, context, query), "depth": whole(0, 4, query)}
            return {**groups, "document_ids": documents(context)}, query, query
        case "document":
            return {"document_ids": torch.stack([documents(query) for _ in range(batch)])}, query, query
        case "prefix":
            prefix = whole(0, context, batch)
            return {"prefix": prefix, "query_len": query, "context_len": context}, query, context
        case "and" | "or":
            return _joined_arguments(mask, batch, context, query, keep, generator)
        case "causal" | "sliding" | "full":
            return {"query_len": query, "context_len": context}, query, context
    raise AssertionError(mask.family)


def _joined_arguments(
    mask: MaskSpec, batch: int, context: int, query: int, keep: float, generator: torch.Generator
) -> tuple[dict[str, Any], int, int]:
    drawn = [mask_arguments(part, batch, context, query, keep, generator) for part in mask.parts or ()]
    # The part with lengths of its own decides; those of the others follow the caller's.
    decisive = [d for d in drawn if d[2] not in (context,)] or drawn
    arguments, query, key = decisive[0]
    tensors = {n: t for each, _, _ in drawn for n, t in each.items() if isinstance(t, Tensor)}
    lengths = {n: v for n, v in arguments.items() if not isinstance(v, Tensor)}
    return {**tensors, **lengths}, query, key


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


def visible(mask: MaskSpec, arguments: dict[str, Any], query: int, key: int) -> Tensor:
    """As ``visible_cells``, from the arguments of ``block_mask``."""
    if mask.family in ("and", "or"):
        parts = [visible(part, arguments, query, key) for part in mask.parts or ()]
        first, *others = parts
        for other in others:
            first = first & other if mask.family == "and" else first | other
        return first
    if mask.family.startswith("dflash"):
        return _drafted(mask, arguments, query, key)
    q, kv = torch.arange(query)[:, None], torch.arange(key)[None, :]
    if mask.family in ("causal", "full", "sliding"):
        cells = kv <= q if mask.family != "full" else torch.ones(query, key, dtype=torch.bool)
        return (cells & (kv > q - mask.window) if mask.window else cells)[None, None]
    return torch.stack([_entry(mask, arguments, b, q, kv) for b in range(_entries(mask, arguments))])[:, None]


def _entries(mask: MaskSpec, arguments: dict[str, Any]) -> int:
    given = {"eagle3": "lengths", "prefix": "prefix", "document": "document_ids"}.get(mask.family)
    return arguments[given].shape[0] if given else 1


def _entry(mask: MaskSpec, arguments: dict[str, Any], b: int, q: Tensor, kv: Tensor) -> Tensor:
    query = q.shape[0]
    if mask.family == "prefix":
        return (kv < arguments["prefix"][b]) | (kv <= q)
    if mask.family == "document":
        ids = arguments["document_ids"][b]
        return (ids[:, None] == ids[None, :]) & (kv <= q)
    if mask.family == "eagle3":
        length = int(arguments["lengths"][b])
        base = (q >= kv) & (kv < length) & (q < length)
        return base | ((kv >= query) & (kv % query < length) & ((kv - q) % query == 0))
    if mask.family == "eagle3-speculators":
        ids = arguments["document_ids"]
        same = ids[:, None] == ids.repeat(kv.shape[1] // query)[None, :]
        window = kv > q - mask.window if mask.window else True
        return (q >= kv) & window & same | (kv % query == q)
    assert mask.family == "peagle"
    anchor, depth = arguments["anchor_pos"], arguments["depth"]
    document = arguments["document_ids"][anchor]
    same = (document[:, None] == document[None, :]) & (document[:, None] != -1)
    context = (depth[None, :] == 0) & (anchor[:, None] >= anchor[None, :])
    group = (anchor[:, None] == anchor[None, :]) & (depth[:, None] >= depth[None, :])
    return same & (context | group)


def _drafted(mask: MaskSpec, arguments: dict[str, Any], query: int, key: int) -> Tensor:
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
