"""Masks of plain sequences: full, causal, sliding window, chunks, packed documents, prefix and padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from aotpack.masks.family import Ends, Family, Input, Lengths, Rule, Seen
from aotpack.spec import MaskSpec

__all__ = ["FAMILIES"]


def _full(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    return lambda b, q, kv: (q >= 0) & (kv >= 0)


def _causal(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    return lambda b, q, kv: q >= kv


def _sliding(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """A row sees itself and the ``window - 1`` cells before it."""
    window = mask.window or 1
    return lambda b, q, kv: (q >= kv) & (q - kv < window)


def _document(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    documents = inputs["document_ids"]
    return lambda b, q, kv: (q >= kv) & (documents[b, q] == documents[b, kv])


def _prefix(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    prefix = inputs["prefix"]
    return lambda b, q, kv: (kv < prefix[b]) | (q >= kv)


def _chunked(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """A row sees the earlier cells of its chunk of ``window`` cells; the first begins at ``start``."""
    start, window = inputs["start"], mask.window or 1

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        first = start[b]
        return (q >= kv) & ((q - first) // window == (kv - first) // window)

    return rule


def _all_keys(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    return lambda b, q: [(q * 0, q * 0 + lengths.key)]


def _earlier(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    return lambda b, q: [(q * 0, q + 1)]


def _last(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    return lambda b, q: [(q - (mask.window or 1) + 1, q + 1)]


def _after_prefix(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    prefix = inputs["prefix"]
    return lambda b, q: [(q * 0, q + 1), (b * 0, prefix[b])]


def _of_chunk(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
    start, window = inputs["start"], mask.window or 1

    def seen(b: Tensor, q: Tensor) -> Sequence[Ends]:
        first = start[b]
        return [(first + (q - first) // window * window, q + 1)]

    return seen


def _padding(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    real = inputs["real"]
    return lambda b, q, kv: real[b, kv] & (q >= 0)


FAMILIES: Final = (
    Family(name="causal", rule=_causal, intervals=_earlier),
    Family(name="full", rule=_full, intervals=_all_keys),
    Family(name="sliding", required=frozenset({"window"}), rule=_sliding, intervals=_last),
    Family(
        name="document",
        inputs=(Input(name="document_ids", dtype=torch.int64, dims=("B", "Q")),),
        square=True,
        rule=_document,
    ),
    Family(
        name="chunked",
        inputs=(Input(name="start", dtype=torch.int64, dims=("B",)),),
        required=frozenset({"window"}),
        rule=_chunked,
        intervals=_of_chunk,
    ),
    Family(name="padding", inputs=(Input(name="real", dtype=torch.bool, dims=("B", "K")),), rule=_padding),
    Family(
        name="prefix",
        inputs=(Input(name="prefix", dtype=torch.int64, dims=("B",)),),
        rule=_prefix,
        intervals=_after_prefix,
    ),
)
