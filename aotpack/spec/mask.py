"""Which cells of an attention are visible."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aotpack.spec.tensors import TensorInput, check_inputs
from aotpack.spec.values import flag, known, nested, positive, present, text, wrong

__all__ = ["MaskSpec"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSpec:
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
        text("mask.family", self.family, "a mask family's name")
        for field in ("block_size", "window"):
            if getattr(self, field) is not None:
                positive(f"mask.{field}", getattr(self, field))
        if self.causal is not None:
            flag("mask.causal", self.causal)
        if self.parts is not None:
            object.__setattr__(self, "parts", nested("mask.parts", self.parts, MaskSpec))
            if len(self.parts) < 2 or not all(isinstance(part, MaskSpec) for part in self.parts):
                raise wrong("mask.parts", "two masks or more", self.parts)
        if self.inputs is not None:
            object.__setattr__(self, "inputs", nested("mask.inputs", self.inputs, TensorInput))
            check_inputs("mask.inputs", self.inputs)
            if any(given.gradient for given in self.inputs):
                raise wrong("mask.inputs", "inputs without gradient: a mask has none", self.inputs)
        for field in ("source", "graph"):
            if getattr(self, field) is not None:
                text(f"mask.{field}", getattr(self, field), "text")

    @property
    def own(self) -> bool:
        """Whether the family names a rule of the user's own, ``"module:function"``."""
        return ":" in self.family

    @property
    def draft_size(self) -> int:
        """Query rows of one anchor, in tokens; 1 where no anchor drafts."""
        return next((leaf.block_size for leaf in self.leaves() if leaf.block_size), 1)

    def leaves(self) -> Iterator[MaskSpec]:
        """This mask, or the masks that it is joined from, at any depth."""
        for part in self.parts or ():
            yield from part.leaves()
        if not self.parts:
            yield self

    def to_dict(self) -> dict[str, Any]:
        """Field values; absent parameters are left out."""
        return present(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MaskSpec:
        """Inverse of ``to_dict``; an unknown field is a ``SpecError``."""
        return cls(**known(cls, "mask", data, {"family"}))
