"""Random arguments of ``block_mask``, and every cell's visibility written from the rules' definitions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotpack.spec import MaskSpec


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Wanted sizes; families whose lengths follow from their tensors take what they can of them."""

    mask: MaskSpec
    generator: torch.Generator
    batch: int
    context: int
    query: int
    keep: float = 0.8

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def documents(self, length: int) -> Tensor:
        """Ids that rise, with padding at the end."""
        ids = self.whole(0, 3, length).sort().values
        ids[length - length // 10 :] = -1
        return ids

    @property
    def anchors(self) -> int:
        return self.query // self.mask.draft_size

    @property
    def unrolled(self) -> int:
        """A key length of whole steps."""
        return self.query * (1 + self.context // self.query)


Arguments = tuple[dict[str, Any], int, int]


def _dflash(d: Draw) -> Arguments:
    arguments = {
        "anchors": d.whole(0, d.context, d.batch, d.anchors).sort(-1).values,
        "keep": torch.rand((d.batch, d.anchors), generator=d.generator) < d.keep,
        "context_len": d.context,
    }
    return arguments, d.query, d.context + d.query


def _speculators(d: Draw) -> Arguments:
    drawn = {"anchors": d.whole(0, d.context, d.anchors), "document_ids": d.documents(d.context)}
    return {**drawn, "context_len": d.context}, d.query, d.context + d.query


def _eagle3(d: Draw) -> Arguments:
    lengths = d.whole(0, d.query + 1, d.batch)
    return {"lengths": lengths, "query_len": d.query, "context_len": d.unrolled}, d.query, d.unrolled


def _eagle3_speculators(d: Draw) -> Arguments:
    return {"document_ids": d.documents(d.query), "context_len": d.unrolled}, d.query, d.unrolled


def _peagle(d: Draw) -> Arguments:
    groups = {"anchor_pos": d.whole(0, d.context, d.query), "depth": d.whole(0, 4, d.query)}
    return {**groups, "document_ids": d.documents(d.context)}, d.query, d.query


def _document(d: Draw) -> Arguments:
    return {"document_ids": torch.stack([d.documents(d.query) for _ in range(d.batch)])}, d.query, d.query


def _prefix(d: Draw) -> Arguments:
    prefix = d.whole(0, d.context, d.batch)
    return {"prefix": prefix, "query_len": d.query, "context_len": d.context}, d.query, d.context


def _chunked(d: Draw) -> Arguments:
    start = d.whole(0, d.context // 2 + 1, d.batch)
    return {"start": start, "query_len": d.query, "context_len": d.context}, d.query, d.context


def _padding(d: Draw) -> Arguments:
    """Padding at either end of an entry, and some cells inside."""
    ends = d.whole(0, d.context + 1, d.batch, 2).sort(-1).values
    cells = torch.arange(d.context)
    real = (cells >= ends[:, :1]) & (cells < ends[:, 1:])
    real &= torch.rand((d.batch, d.context), generator=d.generator) < 0.9
    return {"real": real, "query_len": d.query}, d.query, d.context


def _plain(d: Draw) -> Arguments:
    return {"query_len": d.query, "context_len": d.context}, d.query, d.context


def _joined(d: Draw) -> Arguments:
    parts = [arguments_of(part, d) for part in d.mask.parts or ()]
    # A part with a key length of its own decides; plain masks follow it.
    arguments, query, key = next((part for part in parts if part[2] != d.context), parts[0])
    tensors = {n: v for part, _, _ in parts for n, v in part.items() if isinstance(v, Tensor)}
    return {**tensors, **{n: v for n, v in arguments.items() if not isinstance(v, Tensor)}}, query, key


_FAMILIES: dict[str, Callable[[Draw], Arguments]] = {
    "dflash": _dflash,
    "dflash-speculators": _speculators,
    "eagle3": _eagle3,
    "eagle3-speculators": _eagle3_speculators,
    "peagle": _peagle,
    "document": _document,
    "chunked": _chunked,
    "padding": _padding,
    "prefix": _prefix,
    "causal": _plain,
    "sliding": _plain,
    "full": _plain,
    "and": _joined,
    "or": _joined,
}


def arguments_of(mask: MaskSpec, draw: Draw) -> Arguments:
    """Arguments of ``block_mask``, the query length and the key length."""
    sizes = {"generator": draw.generator, "batch": draw.batch, "context": draw.context, "query": draw.query}
    return _FAMILIES[mask.family](Draw(mask=mask, keep=draw.keep, **sizes))


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
    batched = {
        "eagle3": "lengths",
        "prefix": "prefix",
        "document": "document_ids",
        "chunked": "start",
        "padding": "real",
    }
    given = batched.get(mask.family)
    return arguments[given].shape[0] if given else 1


def _entry(mask: MaskSpec, arguments: dict[str, Any], b: int, q: Tensor, kv: Tensor) -> Tensor:
    query = q.shape[0]
    if mask.family == "prefix":
        return (kv < arguments["prefix"][b]) | (kv <= q)
    if mask.family == "padding":
        return arguments["real"][b].expand(query, -1)
    if mask.family == "chunked":
        start, size = int(arguments["start"][b]), mask.window
        chunk = torch.tensor(
            [math.floor((cell - start) / size) for cell in range(max(q.shape[0], kv.shape[1]))]
        )
        return (kv <= q) & (chunk[:query, None] == chunk[None, : kv.shape[1]])
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
