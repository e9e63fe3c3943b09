"""EAGLE-3's test-time unroll, and P-EAGLE's parallel groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from aotpack.masks.family import Ends, Family, Input, Lengths, Rule, Seen
from aotpack.spec import MaskSpec

__all__ = ["FAMILIES"]


def _eagle3(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """SpecForge's rule for step k: causal over the first Q keys, then each step's own diagonal."""
    real, query = inputs["lengths"], lengths.query

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        length = real[b]
        # A later key is visible to the row that made it alone, so a row past the length sees nothing.
        return (q < length) & ((q >= kv) | ((kv >= query) & (kv % query == q)))

    return rule


def _eagle3_intervals(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    """The earlier keys of the first step, and each step's key of the row itself."""
    real, query = inputs["lengths"], lengths.query

    def seen(b: Tensor, q: Tensor) -> Sequence[Ends]:
        inside = (q < real[b]).to(torch.int64)
        own = q + torch.arange(lengths.key // query, device=real.device) * query
        return [(q * 0, (q + 1) * inside), (own, (own + 1) * inside)]

    return seen


def _speculators(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """speculators' rule: causal inside each packed document, then each step's own diagonal."""
    documents, query, window = inputs["document_ids"], lengths.query, mask.window

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        base = (q >= kv) & (documents[q] == documents[kv % query])
        if window is not None:
            base = base & (kv > q - window)
        return base | (kv % query == q)

    return rule


def _peagle(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """Rows of depth 0 are the context, the others draft from their anchor; documents are kept apart."""
    anchors, depths, documents = inputs["anchor_pos"], inputs["depth"], inputs["document_ids"]

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        anchor, other = anchors[q], anchors[kv]
        document = documents[anchor]
        context = (depths[kv] == 0) & (anchor >= other)
        group = (anchor == other) & (depths[q] >= depths[kv])
        return (document == documents[other]) & (document != -1) & (context | group)

    return rule


FAMILIES: Final = (
    Family(
        name="eagle3",
        inputs=(Input(name="lengths", dtype=torch.int64, dims=("B",)),),
        unrolled=True,
        rule=_eagle3,
        intervals=_eagle3_intervals,
    ),
    Family(
        name="eagle3-speculators",
        inputs=(Input(name="document_ids", dtype=torch.int64, dims=("Q",)),),
        optional=frozenset({"window"}),
        unrolled=True,
        rule=_speculators,
    ),
    Family(
        name="peagle",
        inputs=(
            Input(name="anchor_pos", dtype=torch.int64, dims=("Q",), positions="S", gathered=True),
            Input(name="depth", dtype=torch.int64, dims=("Q",)),
            Input(name="document_ids", dtype=torch.int64, dims=("S",)),
        ),
        square=True,
        rule=_peagle,
    ),
)
