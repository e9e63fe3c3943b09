"""Score modifications as pure tensor functions of a scaled score and its cell (b, h, q, kv).

A rule is called with broadcastable tensors, never with a loop over cells, so that one definition serves the
compiled programs and the dense reference. "q" and "kv" are absolute indices into the query and key axes, as
in ``aotpack.masks``. Cells that the mask hides stay hidden, whatever the rule makes of them.
"""

from __future__ import annotations

from typing import Final

from aotpack.errors import SpecError, UnsupportedError
from aotpack.scores.chained import chained
from aotpack.scores.family import Family, Rule
from aotpack.scores.named import FAMILIES
from aotpack.scores.own import own_family
from aotpack.scores.recorded import recorded_family
from aotpack.scores.sinks import join_sinks, sinks_gradient
from aotpack.spec import AttentionSpec, ScoreSpec

__all__ = [
    "FAMILIES",
    "Family",
    "Rule",
    "check_score",
    "family_of",
    "join_sinks",
    "sinks_gradient",
]

# Arguments that attention itself takes beside a rule's tensors.
_TAKEN: Final = frozenset({"self", "q", "k", "v", "mask", "return_lse"})


def family_of(score: ScoreSpec) -> Family:
    """The family that a score spec names, its parameters checked.

    Raises:
        SpecError: there is no such family, a parameter is missing or means nothing to it, or a tensor has a
            name that an argument of attention has.
    """
    if score.family == "chain":
        family = chained(score, family_of)
    elif score.own:
        family = own_family(score)
    elif score.family == "recorded":
        family = recorded_family(score)
    elif (make := FAMILIES.get(score.family)) is not None:
        family = make(score)
    else:
        raise SpecError(
            "the score family is unknown",
            expected=" or ".join([*sorted(FAMILIES), "chain", "a rule of your own, module:function"]),
            found=score.family,
            remedy="choose a listed family",
        )
    if taken := sorted(_TAKEN & {given.name for given in family.inputs}):
        raise SpecError(
            f"a score rule reads a tensor named '{taken[0]}', which attention itself takes",
            remedy="rename the tensor",
        )
    return family


def check_score(spec: AttentionSpec) -> None:
    """Raises where a spec's score cannot be built.

    Raises:
        SpecError: as ``family_of`` does.
        UnsupportedError: gradients that must be bit-equal from run to run, of tensors that many cells read
            at one place: their sums have no fixed order.
    """
    if spec.score is None:
        return
    family = family_of(spec.score)
    trained = [given.name for given in family.trained if given.name != family.sinks]
    if spec.deterministic and trained:
        raise UnsupportedError(
            f"the gradients of score '{spec.score.family}' are not deterministic",
            expected="no trained tensor that is read in the scores, or deterministic=false",
            found=f"deterministic=true and gradients of {', '.join(trained)}",
            remedy="freeze the tensors or take deterministic out of the spec",
        )
