"""What a mask family is: its tensors, its parameters, how lengths follow from them, and its rule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.spec import MaskSpec, TensorInput

__all__ = ["Ends", "Family", "Input", "Lengths", "Rule", "Seen", "Size"]

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
# First key of some intervals, and the key after their last one.
Ends = tuple[Tensor, Tensor]
Seen = Callable[[Tensor, Tensor], Sequence[Ends]]
# An int, or a symbol of torch.export that stands for one.
Size = Any
_CARRIED: Final = {"T": "context", "Q": "query", "K": "key"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Sizes of one mask's axes, in tokens; ``batch`` is 1 for a mask that all entries share."""

    batch: int
    query: int
    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A tensor that a rule reads.

    Attributes:
        name: of the argument.
        dtype: that callers give it in.
        dims: its axes, as in ``aotpack.spec.TensorInput``.
        positions: the axis that its values are places on, which fit 32 bits; None for other values.
        gathered: whether the rule reads another tensor at those places.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[str | int, ...]
    positions: str | None = None
    gathered: bool = False

    @classmethod
    def declared(cls, given: TensorInput) -> Input:
        """As a spec declares it."""
        return cls(name=given.name, dtype=getattr(torch, given.dtype), dims=given.dims)


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A named mask rule.

    How long the axes are follows from the tensors where it can, and is given by the caller where not. A
    family that drafts has N blocks of ``block_size`` query rows that are also the last keys, after T tokens
    of context. Of the others, the query axis is as long as an input's axis ``"Q"``, and the key axis as an
    input's axis ``"K"`` or, where the family is square, as the query axis.

    Attributes:
        name: as in ``MaskSpec.family``.
        inputs: the tensors of the rule, in the order of the compiled programs' arguments.
        required: parameters of ``MaskSpec`` that must be given.
        optional: parameters that may be given.
        drafts: whether the query axis is made of blocks that anchors draft.
        square: whether the key axis is the query axis.
        unrolled: whether the key axis is the query axis some times over.
        rule: ``rule(spec, inputs, lengths)`` returns the cells' visibility as a function of (b, q, kv), which
            is called with indices inside the axes only.
        intervals: ``intervals(spec, inputs, lengths)`` returns what each row sees as a function of b and q,
            int64 [B,1,1] and [1,Q,1]: the ends [low, high) of some intervals of keys, which broadcast to
            [B,Q,n] with any n. They may be empty, overlap and reach past the keys. None where rows do not
            see intervals.
    """

    name: str
    inputs: tuple[Input, ...] = ()
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    drafts: bool = False
    square: bool = False
    unrolled: bool = False
    rule: Callable[[MaskSpec, Mapping[str, Tensor], Lengths], Rule]
    intervals: Callable[[MaskSpec, Mapping[str, Tensor], Lengths], Seen] | None = None

    @property
    def batched(self) -> bool:
        """Whether the mask differs between batch entries."""
        return any("B" in given.dims for given in self.inputs)

    @property
    def carried(self) -> tuple[str, ...]:
        """The axes whose lengths the caller gives: ``("T",)``, or some of ``"Q"`` and ``"K"``."""
        if self.drafts:
            return ("T",)
        known = {axis for given in self.inputs for axis in given.dims}
        return tuple(a for a in "QK" if a not in known and not (a == "K" and self.square))

    @property
    def carriers(self) -> tuple[str, ...]:
        """Names of the program inputs that carry those lengths."""
        return tuple(f"length.{_CARRIED[axis]}" for axis in self.carried)

    def lengths(self, mask: MaskSpec, sizes: Mapping[str | int, Size]) -> Lengths:
        """The lengths, from the sizes of the inputs' axes and of the carried ones."""
        batch = sizes["B"] if self.batched else 1
        if self.drafts:
            query = sizes["N"] * mask.draft_size
            return Lengths(batch=batch, query=query, key=sizes["T"] + query)
        return Lengths(batch=batch, query=sizes["Q"], key=sizes["Q"] if self.square else sizes["K"])

    def end_of(self, given: Input, inputs: Mapping[str, Tensor], lengths: Lengths) -> Size:
        """Length of the axis that the values of an input are places on."""
        for other in self.inputs:
            if given.positions in other.dims:
                return inputs[other.name].shape[other.dims.index(given.positions)]
        return lengths.key - lengths.query

    def check(self, mask: MaskSpec) -> None:
        """Raises ``SpecError`` when a parameter is missing or means nothing to this family."""
        given = set(mask.to_dict()) - {"family"}
        if missing := sorted(self.required - given):
            raise SpecError(f"mask family '{self.name}' needs {', '.join(missing)}", found=mask.to_dict())
        if extra := sorted(given - self.required - self.optional):
            raise SpecError(
                f"mask family '{self.name}' takes no {', '.join(extra)}",
                expected=", ".join(sorted(self.required | self.optional)) or "no parameters",
                found=mask.to_dict(),
                remedy="remove it or choose another family",
            )
