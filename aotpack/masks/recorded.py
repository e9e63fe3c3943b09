"""Masks that were recorded from a function as a graph of torch operators (``aotpack.capture``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from aotpack.graph import Graph
from aotpack.masks.family import Family, Input, Lengths, Rule
from aotpack.spec import MaskSpec

__all__ = ["MASK_CELLS", "recorded_family"]

# Masks are one for all heads, so their graphs do not read h.
MASK_CELLS: Final = ("b", "q", "kv")


def recorded_family(mask: MaskSpec) -> Family:
    """The family of one recorded mask.

    Raises:
        SpecError: the graph is missing, is no graph, or calls an operator that is not allowed.
    """
    family = Family(
        name="recorded", required=frozenset({"graph"}), optional=frozenset({"inputs"}), rule=_rule
    )
    family.check(mask)
    graph = _graph(mask)
    return Family(
        name="recorded",
        inputs=tuple(Input.declared(given) for given in graph.inputs),
        required=frozenset({"graph"}),
        optional=frozenset({"inputs"}),
        square=graph.square(),
        rule=_rule,
    )


def _graph(mask: MaskSpec) -> Graph:
    return Graph.parse(mask.graph or "", mask.inputs or (), MASK_CELLS)


def _rule(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    graph = _graph(mask)
    bound, unread = graph.bind(inputs), {"q", "kv"} - graph.reads()

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        cells = {"b": b, "q": q, "kv": kv}
        visible = bound(cells)
        if visible.dtype != torch.bool:
            visible = visible != 0
        for name in sorted(unread):
            # Callers take the value's shape for the cells'.
            visible = visible & (cells[name] >= 0)
        return visible

    return rule
