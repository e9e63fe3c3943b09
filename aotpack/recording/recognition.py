"""Recorded masks that are a named family's, recognised exactly.

A mask is taken apart into the conditions that must all hold. A comparison of whole numbers becomes
``sum of factor * term + offset >= 0`` or ``= 0``, so that ``kv > q - W``, ``q - kv < W`` and
``q - kv <= W - 1`` are one condition.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from aotpack.recording.expressions import Expression, cell, gather
from aotpack.spec import MaskSpec, TensorInput

__all__ = ["Named", "recognised"]


@dataclass(frozen=True, slots=True)
class Named:
    """A named mask, and for each tensor of the family the recorded tensor that it is."""

    mask: MaskSpec
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Condition:
    """``sum of factor * term + offset`` is 0 (``relation`` "eq") or at least 0 ("ge"); or anything else."""

    relation: str
    terms: frozenset[tuple[str, int]]
    offset: int = 0


_Q: Final = cell("q").key
_KV: Final = cell("kv").key
_CAUSAL: Final = _Condition("ge", frozenset({(_Q, 1), (_KV, -1)}))
_RECENT: Final = frozenset({(_Q, -1), (_KV, 1)})


def recognised(expression: Expression, inputs: tuple[TensorInput, ...]) -> Named | None:
    """The named mask that a recorded one is in every cell; None where it is none."""
    if expression.kind == "constant":
        return Named(MaskSpec(family="full"), {}) if expression.value is True else None
    conditions = {_condition(part) for part in _conjuncts(expression, "and")}
    if not inputs:
        return _sequence(conditions)
    if len(inputs) == 1 and inputs[0].dtype == "int64":
        given = inputs[0]
        if given.dims == ("B", "Q"):
            return _documents(conditions, given.name)
        if given.dims == ("B",):
            return _prefix(expression, given.name)
    return None


def _sequence(conditions: set[_Condition]) -> Named | None:
    window, others = _window(conditions)
    if others != {_CAUSAL}:
        return None
    if window is None:
        return Named(MaskSpec(family="causal"), {})
    return Named(MaskSpec(family="sliding", window=window), {})


def _documents(conditions: set[_Condition], name: str) -> Named | None:
    row, column = (gather(name, (cell("b"), cell(place))) for place in ("q", "kv"))
    window, others = _window(conditions)
    if others != {_CAUSAL, _equal(row, column)}:
        return None
    document = MaskSpec(family="document")
    if window is None:
        return Named(document, {"document_ids": name})
    sliding = MaskSpec(family="sliding", window=window)
    return Named(MaskSpec(family="and", parts=(document, sliding)), {"document_ids": name})


def _prefix(expression: Expression, name: str) -> Named | None:
    either = {_condition(part) for part in _conjuncts(expression, "or")}
    start = gather(name, (cell("b"),)).key
    inside = _Condition("ge", frozenset({(start, 1), (_KV, -1)}), -1)
    return Named(MaskSpec(family="prefix"), {"prefix": name}) if either == {_CAUSAL, inside} else None


def _window(conditions: set[_Condition]) -> tuple[int | None, set[_Condition]]:
    """The window of the one condition that is one, and the other conditions."""
    found = [c for c in conditions if c.relation == "ge" and c.terms == _RECENT and c.offset >= 0]
    if len(found) != 1:
        return None, conditions
    return found[0].offset + 1, conditions - set(found)


def _conjuncts(expression: Expression, operator: str) -> Iterator[Expression]:
    if expression.kind != operator:
        yield expression
        return
    for arg in expression.args:
        yield from _conjuncts(arg, operator)


def _condition(expression: Expression) -> _Condition:
    if expression.kind not in ("ge", "gt", "eq"):
        return _Condition(expression.kind, frozenset({(expression.key, 1)}))
    left, right = expression.args
    if expression.kind == "eq":
        return _equal(left, right)
    terms, offset = _difference(left, right)
    return _Condition("ge", frozenset(terms.items()), offset - (expression.kind == "gt"))


def _equal(left: Expression, right: Expression) -> _Condition:
    terms, offset = _difference(left, right)
    sign = 1 if not terms or terms[min(terms)] > 0 else -1
    return _Condition("eq", frozenset((key, sign * factor) for key, factor in terms.items()), sign * offset)


def _difference(left: Expression, right: Expression) -> tuple[dict[str, int], int]:
    terms: dict[str, int] = {}
    offset = _add(terms, left, 1) + _add(terms, right, -1)
    return {key: factor for key, factor in terms.items() if factor}, offset


def _add(terms: dict[str, int], expression: Expression, factor: int) -> int:
    """Adds ``factor * expression`` to the terms, and returns the number in it."""
    match expression.kind, expression.args:
        case "constant", _ if type(expression.value) is int:
            return factor * int(expression.value)
        case "add", (left, right):
            return _add(terms, left, factor) + _add(terms, right, factor)
        case "sub", (left, right):
            return _add(terms, left, factor) + _add(terms, right, -factor)
        case "neg", (value,):
            return _add(terms, value, -factor)
    terms[expression.key] = terms.get(expression.key, 0) + factor
    return 0
