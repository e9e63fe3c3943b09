"""``chain`` of score modifications: each changes what the one before it made of a score."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from aotpack.errors import SpecError
from aotpack.scores.family import Family, Rule, check_parameters
from aotpack.spec import ScoreSpec

__all__ = ["chained"]


def chained(score: ScoreSpec, family_of: Callable[[ScoreSpec], Family]) -> Family:
    """The family of a chain. Sinks join the softmax, wherever they stand in it.

    Raises:
        SpecError: there are no parts, or two of them name a tensor alike.
    """
    check_parameters(score, {"parts"})
    families = [family_of(part) for part in score.parts or ()]
    inputs = [given for family in families for given in family.inputs]
    names = [given.name for given in inputs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise SpecError(
            f"two parts of a chain of scores name a tensor '{twice[0]}'",
            expected="another name for each tensor",
            found=", ".join(names),
            remedy="write one of them as a rule of your own, with names of its own",
        )
    makers = [family.rule for family in families if family.rule is not None]

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        rules = [make(tensors, heads) for make in makers]

        def modified(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            for each in rules:
                s = each(s, b, h, q, kv)
            return s

        return modified

    return Family(
        name=score.family,
        inputs=tuple(inputs),
        rule=rule if makers else None,
        sinks=next((family.sinks for family in families if family.sinks), None),
    )
