"""Python numbers in a rule: those that change from step to step are refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import Tensor

from aotpack.errors import SpecError
from aotpack.masks import Lengths
from aotpack.recording.closures import Closure, Held
from aotpack.recording.expressions import Expression, parts
from aotpack.recording.tracing import title

__all__ = ["NumberCheck"]


class NumberCheck:
    """The numbers of one capture; a graph has them as they are, so they must not change."""

    def __init__(self, static: Collection[str]) -> None:
        self._static = frozenset(static)
        self._earlier: dict[tuple[Any, str, str], Held] = {}

    def held(self, function: Any, closure: Closure, lengths: Lengths) -> None:
        """Refuses numbers that are lengths, or that another call of the same code had otherwise.

        Raises:
            SpecError: names the variable, the function, and how to declare it.
        """
        known = _lengths(lengths)
        code = getattr(function, "__code__", None) or closure.codes[:1]
        for held in closure.numbers():
            if held.name in self._static:
                continue
            if type(held.value) is int and held.value in known:
                _refuse(held, f"{held.value}, which is {known[held.value]}")
            earlier = self._earlier.setdefault((code, held.path, held.function), held)
            if type(earlier.value) is type(held.value) and earlier.value != held.value:
                _refuse(held, f"{earlier.value} in one call and {held.value} in another")

    def computed(
        self,
        function: Any,
        closure: Closure,
        lengths: Lengths,
        expression: Expression,
        tensors: Mapping[str, Tensor],
    ) -> None:
        """Refuses whole numbers that the function computed, as far as they are lengths or sizes.

        Raises:
            SpecError: names the function and what the number is.
        """
        known = {**_sizes(tensors), **_lengths(lengths)}
        known |= {size - 1: f"one less than {name}" for size, name in known.items() if size - 1 not in known}
        innocent = closure.literals() | {held.value for held in closure.numbers()}
        for part in parts(expression):
            value = part.value
            if type(value) is int and value > 1 and value in known and value not in innocent:
                raise SpecError(
                    f"the function '{title(function)}' computes a Python number that changes",
                    expected="numbers that are the same in every step",
                    found=f"{value}, which is {known[value]}",
                    remedy="close over a tensor with that value, torch.tensor(number), which becomes an"
                    " input; or, if it is chance, record with other lengths",
                )


def _refuse(held: Held, what: str) -> NoReturn:
    name = held.name
    raise SpecError(
        f"the function '{held.function}' closes over the Python number '{name}', which changes",
        expected="a number that is the same in every step, or a tensor",
        found=f"{name} = {what}",
        remedy=f"close over a tensor instead, {name} = torch.tensor({name}), which becomes an input of the"
        f" mask; or write the rule as module:function, which may ask for query_len and key_len; or, if every"
        f" value is to be a spec of its own, capture(..., static_numbers=['{name}'])",
    )


def _lengths(lengths: Lengths) -> dict[int, str]:
    query, key = lengths.query, lengths.key
    known = {
        abs(key - query): "the difference of the key length and the query length",
        key + query: "the sum of the key length and the query length",
        key: "the key length",
        query: "the query length" if query != key else "the query and the key length",
    }
    return {length: name for length, name in known.items() if length > 1}


def _sizes(tensors: Mapping[str, Tensor]) -> dict[int, str]:
    return {
        size: f"the size of axis {axis} of '{name}'"
        for name, tensor in tensors.items()
        for axis, size in enumerate(tensor.shape)
        if size > 1
    }
