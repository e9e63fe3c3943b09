"""How an attention changes its scores before, or in, the softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotpack.spec.rule import RuleSpec
from aotpack.spec.tensors import TensorInput
from aotpack.spec.values import finite, flag, known, positive, present

__all__ = ["ScoreSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSpec(RuleSpec):
    """A score modification with its static parameters; the rules are in ``aotpack.scores``.

    Attributes:
        family: name of the rule, for example ``"softcap"``; ``"chain"`` of ``parts``; or a rule of your own
            as ``"module:function"`` (``aotpack.own``).
        cap: bound of the soft-capped scores (``softcap``).
        distance: largest relative position with a bias of its own, in tokens (``relative-bias``).
        frozen: whether the tensors of a named rule get no gradient.
        parts: the modifications of a ``"chain"``, applied in order.
        inputs: tensors that a rule of your own reads.
        source: SHA-256 of the source of a rule of your own.
        graph: a rule that was recorded as a graph of torch operators (family ``"recorded"``).
    """

    family: str
    cap: float | None = None
    distance: int | None = None
    frozen: bool | None = None
    parts: tuple[ScoreSpec, ...] | None = None
    inputs: tuple[TensorInput, ...] | None = None
    source: str | None = None
    graph: str | None = None

    def __post_init__(self) -> None:
        self._check_rule("score", "two modifications or more")
        if self.cap is not None:
            object.__setattr__(self, "cap", finite("score.cap", self.cap))
        if self.distance is not None:
            positive("score.distance", self.distance)
        if self.frozen is not None:
            flag("score.frozen", self.frozen)

    def to_dict(self) -> dict[str, Any]:
        """Field values; absent parameters are left out."""
        return present(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ScoreSpec:
        """Inverse of ``to_dict``; an unknown field is a ``SpecError``."""
        return cls(**known(cls, "score", data, {"family"}))
