"""What a score family is: its tensors, its rule, and how a spec's parameters are checked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.spec import ScoreSpec, TensorInput

__all__ = ["Family", "Rule", "check_parameters"]

Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A score modification with its parameters filled in.

    Attributes:
        name: as in ``ScoreSpec.family``.
        inputs: the tensors that it reads, in the order of the compiled programs' arguments: those that get a
            gradient first, and of these the sinks last.
        rule: ``rule(tensors, heads)`` returns ``(score, b, h, q, kv) -> score`` for broadcastable tensors,
            called with indices inside the axes only; None where the scores stay as they are.
        sinks: name of the input that joins the softmax's denominator with one logit a head.
    """

    name: str
    inputs: tuple[TensorInput, ...] = ()
    rule: Callable[[Mapping[str, Tensor], int], Rule] | None = None
    sinks: str | None = None

    def __post_init__(self) -> None:
        ordered = sorted(self.inputs, key=lambda given: (not given.gradient, given.name == self.sinks))
        object.__setattr__(self, "inputs", tuple(ordered))

    @property
    def trained(self) -> tuple[TensorInput, ...]:
        """The inputs that get a gradient."""
        return tuple(given for given in self.inputs if given.gradient)

    def modify(self, score: Tensor, tensors: Mapping[str, Tensor], *at: Tensor) -> Tensor:
        """The modified scores, shaped as ``score`` [B,H,Q,K], at the cells ``b, h, q, kv``."""
        if self.rule is None:
            return score
        found = self.rule(tensors, score.shape[1])(score, *at)
        return found.to(score.dtype).expand(score.shape)

    def for_dense(self, tensors: Mapping[str, Tensor], query: int, key: int) -> dict[str, Any]:
        """The arguments of ``aotpack.dense.dense_attention`` that apply this to scores [B,H,query,key]."""

        def modify(score: Tensor) -> Tensor:
            sizes = (*score.shape[:2], query, key)
            at = [
                torch.arange(size, device=score.device).view([-1 if i == axis else 1 for i in range(4)])
                for axis, size in enumerate(sizes)
            ]
            return self.modify(score, tensors, *at)

        return {"modify": modify, "sinks": None if self.sinks is None else tensors[self.sinks]}


def check_parameters(
    score: ScoreSpec, required: Collection[str] = (), optional: Collection[str] = ()
) -> None:
    """Raises ``SpecError`` when a parameter is missing or means nothing to this family."""
    given = set(score.to_dict()) - {"family"}
    if missing := sorted(set(required) - given):
        raise SpecError(f"score family '{score.family}' needs {', '.join(missing)}", found=score.to_dict())
    if extra := sorted(given - set(required) - set(optional)):
        raise SpecError(
            f"score family '{score.family}' takes no {', '.join(extra)}",
            expected=", ".join(sorted({*required, *optional})) or "no parameters",
            found=score.to_dict(),
            remedy="remove it or choose another family",
        )
