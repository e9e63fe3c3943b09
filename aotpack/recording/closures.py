"""What a mask or score function holds besides its arguments: tensors, numbers, other functions; by name."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.recording.tracing import title

__all__ = ["Closure", "Held", "closure_of", "namer"]

_DEPTH: Final = 8
# Names that ``block_mask`` and the programs use for arguments of their own.
_TAKEN: Final = frozenset(
    {
        "b",
        "h",
        "q",
        "kv",
        "k",
        "v",
        "score",
        "mask",
        "self",
        "check",
        "query_len",
        "context_len",
        "out",
        "lse",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """A tensor or number that a function holds.

    Attributes:
        name: of the variable, attribute or argument.
        path: from the function that flex_attention was given to it; the same in every call.
        function: that reads it.
        value: the tensor, int or float.
    """

    name: str
    path: str
    function: str
    value: Any


@dataclass(frozen=True, slots=True)
class Closure:
    """All that a function and the functions that it holds read."""

    held: tuple[Held, ...]
    codes: tuple[types.CodeType, ...]

    def literals(self) -> frozenset[int]:
        """Whole numbers that are written in the functions' source."""
        return frozenset(value for code in self.codes for value in code.co_consts if type(value) is int)

    def numbers(self) -> list[Held]:
        """The ints and floats; truth values choose a rule, and are none."""
        return [held for held in self.held if not isinstance(held.value, Tensor)]


def closure_of(function: Callable[..., Any]) -> Closure:
    """What a function holds: closure variables, arguments of partials, attributes, globals and defaults.

    Of objects, and of a module's globals, only what the function's source names is looked at.
    """
    walk = _Walk()
    held = tuple(walk.function(function, "", _DEPTH))
    return Closure(held=held, codes=tuple(walk.codes))


def namer(closure: Closure) -> Callable[[Tensor], str]:
    """Gives each tensor the name of the variable that holds it; unique, and an identifier."""
    names = {id(held.value): held.name for held in reversed(closure.held) if isinstance(held.value, Tensor)}
    given: dict[int, str] = {}

    def name(tensor: Tensor) -> str:
        if id(tensor) not in given:
            stem = names.get(id(tensor), "tensor")
            stem = stem if stem.isidentifier() and stem.isascii() and len(stem) < 56 else "tensor"
            taken = {*given.values(), *_TAKEN}
            numbered = (f"{stem}_{i}" for i in range(1, len(taken) + 2))
            given[id(tensor)] = stem if stem not in taken else next(n for n in numbered if n not in taken)
        return given[id(tensor)]

    return name


class _Walk:
    def __init__(self) -> None:
        self.codes: list[types.CodeType] = []
        self._seen: set[int] = set()
        self._looked: set[tuple[int, int]] = set()

    def function(self, function: Any, path: str, depth: int) -> Iterator[Held]:
        """What any callable holds."""
        if id(function) in self._seen or depth == 0:
            return
        self._seen.add(id(function))
        if isinstance(function, functools.partial):
            yield from self._partial(function, path, depth)
        elif inspect.ismethod(function):
            yield from self.function(function.__func__, path, depth - 1)
            yield from self._value(function.__self__, "self", path, function.__func__, depth)
        elif inspect.isfunction(function):
            yield from self._plain(function, path, depth)
        elif isinstance(method := _called(function), types.FunctionType):
            yield from self.function(method, path, depth - 1)
            yield from self._attributes(function, path, method, depth)

    def _partial(self, partial: Any, path: str, depth: int) -> Iterator[Held]:
        yield from self.function(partial.func, path, depth - 1)
        code = getattr(partial.func, "__code__", None)
        names = code.co_varnames if code is not None else ()
        for place, value in enumerate(partial.args):
            name = names[place] if place < len(names) else f"argument{place}"
            yield from self._value(value, name, path, partial.func, depth)
        for name, value in partial.keywords.items():
            yield from self._value(value, name, path, partial.func, depth)

    def _plain(self, function: types.FunctionType, path: str, depth: int) -> Iterator[Held]:
        if function.__module__ is not None and function.__module__.partition(".")[0] == "torch":
            # torch's own combinators, such as and_masks, hold functions; what else torch holds is its own.
            yield from self._cells(function, path, depth)
            return
        codes = list(_codes(function.__code__))
        self.codes += codes
        yield from self._cells(function, path, depth)
        names = inspect.signature(function).parameters
        for name, parameter in names.items():
            if parameter.default is not parameter.empty:
                yield from self._value(parameter.default, name, path, function, depth)
        for name in dict.fromkeys(name for code in codes for name in code.co_names):
            value = function.__globals__.get(name)
            if isinstance(value, Tensor | int | float | types.FunctionType | functools.partial):
                yield from self._value(value, name, path, function, depth)

    def _cells(self, function: types.FunctionType, path: str, depth: int) -> Iterator[Held]:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            yield from self._value(value, name, path, function, depth)

    def _value(self, value: Any, name: str, path: str, owner: Any, depth: int) -> Iterator[Held]:
        path = f"{path}.{name}".lstrip(".")
        if isinstance(value, Tensor) or type(value) in (int, float):
            yield Held(name=name.partition("[")[0], path=path, function=title(owner), value=value)
        elif depth == 0:
            return
        elif isinstance(value, list | tuple):
            for place, item in enumerate(value):
                yield from self._value(item, f"{name}[{place}]", path.rpartition(".")[0], owner, depth - 1)
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from self._value(item, f"{name}[{key!r}]", path.rpartition(".")[0], owner, depth - 1)
        elif inspect.isroutine(value) or isinstance(value, functools.partial):
            yield from self.function(value, path, depth - 1)
        elif not isinstance(value, type | types.ModuleType) and hasattr(value, "__dict__"):
            yield from self._attributes(value, path, owner, depth)
            yield from self.function(value, path, depth - 1)

    def _attributes(self, value: Any, path: str, owner: Any, depth: int) -> Iterator[Held]:
        code = getattr(owner, "__code__", None)
        if code is None or depth == 0 or (id(value), id(code)) in self._looked:
            return
        self._looked.add((id(value), id(code)))
        attributes = dict(vars(value))
        for kind in ("_parameters", "_buffers", "_modules"):
            attributes |= attributes.get(kind) or {}
        for name in dict.fromkeys(name for each in _codes(code) for name in each.co_names):
            if name in attributes:
                yield from self._value(attributes[name], name, path, owner, depth - 1)


def _called(function: Any) -> Any:
    """The method that runs when an object is called."""
    kind: Any = type(function)
    return (
        kind.forward
        if isinstance(function, torch.nn.Module)
        else inspect.getattr_static(kind, "__call__", None)
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            yield from _codes(value)
