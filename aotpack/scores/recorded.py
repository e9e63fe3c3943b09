"""Scores that were recorded from a function as a graph of torch operators (``aotpack.capture``)."""

from __future__ import annotations

from typing import Final

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

    def rule(heads: int) -> Rule:
        return lambda tensors, *cell: graph.bind(tensors)(dict(zip(SCORE_CELLS, cell, strict=True)))

    return Family(name="recorded", inputs=score.inputs or (), rule=rule)
