"""Tensors that a mask or score rule reads, as a spec declares them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from aotpack.errors import SpecError
from aotpack.spec.values import flag, known, positive, present, text, wrong

__all__ = ["INPUT_DTYPES", "TensorInput", "check_inputs", "shape_of"]

INPUT_DTYPES: Final = ("bool", "int8", "uint8", "int32", "int64", "float32", "bfloat16", "float16")
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_AXIS: Final = re.compile(r"[A-Z][A-Za-z0-9]{0,15}")
_FLOATING: Final = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInput:
    """One tensor that a rule reads.

    Attributes:
        name: of the argument.
        dtype: that callers give it in: ``"bool"``, ``"int8"``, ``"uint8"``, ``"int32"``, ``"int64"``,
            ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        dims: its axes. A number is a fixed size. ``"B"`` is the batch, ``"Q"`` the query length, ``"K"`` the
            key length, ``"T"`` the context length and ``"N"`` the anchors; in a score rule ``"H"`` is the
            query heads, a fixed size. Any other name that begins with a capital letter is an axis of its
            own, of any length. ``()`` is a scalar.
        gradient: whether it gets a gradient (score rules only).
    """

    name: str
    dtype: str
    dims: tuple[str | int, ...]
    gradient: bool = False

    def __post_init__(self) -> None:
        text("inputs.name", self.name, "a tensor's name")
        if not _NAME.fullmatch(self.name):
            raise wrong("inputs.name", "letters, digits and _", self.name)
        if self.dtype not in INPUT_DTYPES:
            raise wrong(f"inputs.{self.name}.dtype", " or ".join(INPUT_DTYPES), self.dtype)
        if not isinstance(self.dims, list | tuple):
            raise wrong(f"inputs.{self.name}.dims", "a list of axes", self.dims)
        object.__setattr__(self, "dims", tuple(self.dims))
        for axis in self.dims:
            if not isinstance(axis, str):
                positive(f"inputs.{self.name}.dims", axis)
            elif not _AXIS.fullmatch(axis):
                raise wrong(f"inputs.{self.name}.dims", "a capital letter and letters or digits", axis)
        flag(f"inputs.{self.name}.gradient", self.gradient)
        if self.gradient and self.dtype not in _FLOATING:
            raise wrong(f"inputs.{self.name}.gradient", f"false for {self.dtype}", self.gradient)

    def to_dict(self) -> dict[str, Any]:
        """Field values; ``gradient`` is left out where it is false."""
        values = present(self)
        if not self.gradient:
            del values["gradient"]
        return values

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TensorInput:
        """Inverse of ``to_dict``; an unknown field is a ``SpecError``."""
        return cls(**known(cls, "inputs", data, {"name", "dtype", "dims"}))


def shape_of(dims: Sequence[str | int], sizes: Mapping[Any, int], other: int | None = None) -> list[int]:
    """Sizes of axes; ``other`` is that of an axis that ``sizes`` lacks: a ``KeyError`` without it."""

    def size(axis: str) -> int:
        return sizes[axis] if other is None else sizes.get(axis, other)

    return [size(axis) if isinstance(axis, str) else axis for axis in dims]


def check_inputs(field: str, inputs: tuple[TensorInput, ...]) -> None:
    """Refuses what is no ``TensorInput``, and two of one name."""
    names = set[str]()
    for given in inputs:
        if not isinstance(given, TensorInput):
            raise wrong(field, "TensorInput values", given)
        if given.name in names:
            raise SpecError(f"spec field '{field}' names '{given.name}' twice", remedy="rename one of them")
        names.add(given.name)
