"""DFlash drafters: N blocks of query rows, each after an anchor in the context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from aotpack.masks.family import Ends, Family, Input, Lengths, Rule, Seen
from aotpack.spec import MaskSpec

__all__ = ["FAMILIES"]


def _dflash(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """SpecForge's and TorchSpec's rule; the window's lower bound moves with the offset in the block."""
    anchors, keep = inputs["anchors"], inputs["keep"]
    size, window = mask.block_size or 1, mask.window
    # Read out here: Inductor cannot read a size inside a rule that it compiles into attention.
    context_len = lengths.key - lengths.query

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, offset = q // size, q % size
        anchor = anchors[b, block]
        context = (kv < context_len) & (kv < anchor)
        own = (kv >= context_len) & ((kv - context_len) // size == block)
        if window is not None:
            context = context & (kv >= anchor + offset - (window - 1))
            own = own & ((kv - context_len) % size <= offset)
        return (context | own) & keep[b, block]

    return rule


def _dflash_intervals(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    """Some context before the anchor, and the row's own block, up to the row itself with a window."""
    anchors, keep = inputs["anchors"], inputs["keep"]
    size, window = mask.block_size or 1, mask.window
    context_len = lengths.key - lengths.query

    def seen(b: Tensor, q: Tensor) -> Sequence[Ends]:
        block, offset = q // size, q % size
        anchor, kept = anchors[b, block], keep[b, block].to(torch.int64)
        own = context_len + block * size
        low, end = q * 0, own + size
        if window is not None:
            low, end = anchor + offset - (window - 1), own + offset + 1
        return [(low, anchor.clamp(max=context_len) * kept), (own, end * kept)]

    return seen


def _speculators(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """speculators' rule: packed documents, and a window whose lower bound does not move in the block."""
    documents, anchors = inputs["document_ids"], inputs["anchors"]
    size, window = mask.block_size or 1, mask.window
    packed_len = lengths.key - lengths.query

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = q // size
        anchor = anchors[block]
        document = documents[anchor]
        same = (documents[kv.clamp(max=packed_len - 1)] == document) & (document != -1)
        base = (kv < packed_len) & same & (kv < anchor)
        own = (kv >= packed_len) & ((kv - packed_len) // size == block)
        if window is not None:
            base = base & (kv >= anchor - window)
            if mask.causal:
                own = own & (kv <= q + packed_len)
        return base | own

    return rule


FAMILIES: Final = (
    Family(
        name="dflash",
        inputs=(
            Input(name="anchors", dtype=torch.int64, dims=("B", "N"), positions="T"),
            Input(name="keep", dtype=torch.bool, dims=("B", "N")),
        ),
        required=frozenset({"block_size"}),
        optional=frozenset({"window"}),
        drafts=True,
        rule=_dflash,
        intervals=_dflash_intervals,
    ),
    Family(
        name="dflash-speculators",
        inputs=(
            Input(name="document_ids", dtype=torch.int64, dims=("T",)),
            Input(name="anchors", dtype=torch.int64, dims=("N",), positions="T", gathered=True),
        ),
        required=frozenset({"block_size"}),
        optional=frozenset({"window", "causal"}),
        drafts=True,
        rule=_speculators,
    ),
)
