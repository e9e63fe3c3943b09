"""Score rules of a user's own, ``"module:function"``; imported when a package is built, never on a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from aotpack.own import function_of
from aotpack.scores.family import Family, Rule, check_parameters
from aotpack.spec import ScoreSpec

__all__ = ["own_family"]


def own_family(score: ScoreSpec) -> Family:
    """The family of a rule of the user's own, by what the spec declares; the function is not imported."""
    check_parameters(score, (), {"inputs", "source"})
    declared = score.inputs or ()

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        function: Any = function_of(score.family, score.source)
        arguments = {given.name: tensors[given.name] for given in declared}
        return lambda s, b, h, q, kv: function(s, b, h, q, kv, **arguments)

    return Family(name=score.family, inputs=declared, rule=rule)
