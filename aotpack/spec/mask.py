"""Which cells of an attention are visible."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotpack.spec.rule import RuleSpec
from aotpack.spec.tensors import TensorInput
from aotpack.spec.values import flag, known, positive, present, wrong

__all__ = ["MaskSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSpec(RuleSpec):
    """A mask family with its static parameters; the rules are in ``aotpack.masks``.

    Attributes:
        family: name of the rule, for example ``"dflash"``; ``"and"`` or ``"or"`` of ``parts``; or a rule of
            your own as ``"module:function"`` (``aotpack.own``).
        block_size: query rows that one anchor drafts, in tokens (dflash families, and rules of your own).
        window: sliding window in tokens; None is no window.
        causal: whether the window also bounds a block's own cells by their offset
            (the windowed ``dflash-speculators`` rule has both variants).
        parts: the masks that ``"and"`` and ``"or"`` join.
        inputs: tensors that a rule of your own reads.
        source: SHA-256 of the source of a rule of your own.
        graph: a rule that was recorded as a graph of torch operators (family ``"recorded"``).
    """

    family: str
    block_size: int | None = None
    window: int | None = None
    causal: bool | None = None
    parts: tuple[MaskSpec, ...] | None = None
    inputs: tuple[TensorInput, ...] | None = None
    source: str | None = None
    graph: str | None = None

    def __post_init__(self) -> None:
        self._check_rule("mask", "two masks or more")
        for field in ("block_size", "window"):
            if getattr(self, field) is not None:
                positive(f"mask.{field}", getattr(self, field))
        if self.causal is not None:
            flag("mask.causal", self.causal)
        if any(given.gradient for given in self.inputs or ()):
            raise wrong("mask.inputs", "inputs without gradient: a mask has none", self.inputs)

    @property
    def draft_size(self) -> int:
        """Query rows of one anchor, in tokens; 1 where no anchor drafts."""
        return next((leaf.block_size for leaf in self.leaves() if leaf.block_size), 1)

    def to_dict(self) -> dict[str, Any]:
        """Field values; absent parameters are left out."""
        return present(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MaskSpec:
        """Inverse of ``to_dict``; an unknown field is a ``SpecError``."""
        return cls(**known(cls, "mask", data, {"family"}))
