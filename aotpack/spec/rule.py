"""What mask and score specs have in common: parts, rules of the user's own and recorded ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from aotpack.spec.tensors import TensorInput, check_inputs
from aotpack.spec.values import nested, text, wrong

__all__ = ["RuleSpec"]


class RuleSpec:
    """A rule by its family; mask and score specs add their parameters."""

    __slots__ = ()

    # Declared by the data classes.
    family: Any
    parts: Any

    def _check_rule(self, name: str, several: str) -> None:
        """Checks, and takes as tuples, the fields that both kinds have.

        Args:
            name: of the field of ``AttentionSpec``.
            several: what ``parts`` must be, for its error.
        """
        rule: Any = self
        text(f"{name}.family", rule.family, f"a {name} family's name")
        if rule.parts is not None:
            object.__setattr__(rule, "parts", nested(f"{name}.parts", rule.parts, type(rule)))
            if len(rule.parts) < 2 or not all(isinstance(part, type(rule)) for part in rule.parts):
                raise wrong(f"{name}.parts", several, rule.parts)
        if rule.inputs is not None:
            object.__setattr__(rule, "inputs", nested(f"{name}.inputs", rule.inputs, TensorInput))
            check_inputs(f"{name}.inputs", rule.inputs)
        for field in ("source", "graph"):
            if getattr(rule, field) is not None:
                text(f"{name}.{field}", getattr(rule, field), "text")

    @property
    def own(self) -> bool:
        """Whether the family names a rule of the user's own, ``"module:function"``."""
        return ":" in self.family

    def leaves(self) -> Iterator[Self]:
        """This rule, or those that it is made of, at any depth."""
        for part in self.parts or ():
            yield from part.leaves()
        if not self.parts:
            yield self
