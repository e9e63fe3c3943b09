"""Scores that were recorded from a function as a graph of torch operators (``aotpack.capture``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor

from aotpack.graph import Graph
from aotpack.scores.family import Family, Rule, check_parameters
from aotpack.spec import ScoreSpec

__all__ = ["SCORE_CELLS", "recorded_family"]

SCORE_CELLS: Final = ("score", "b", "h", "q", "kv")


def recorded_family(score: ScoreSpec) -> Family:
    """The family of one recorded score.

    Raises:
        SpecError: the graph is missing, is no graph, or calls an operator that is not allowed.
    """
    check_parameters(score, {"graph"}, {"inputs"})
    graph = Graph.parse(score.graph or "", score.inputs or (), SCORE_CELLS)

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        bound = graph.bind(tensors)
        return lambda *cell: bound(dict(zip(SCORE_CELLS, cell, strict=True)))

    return Family(name="recorded", inputs=score.inputs or (), rule=rule)
