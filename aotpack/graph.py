"""Graphs of recorded rules: what a mask or score function computes for one cell, as text and as tensors.

The text is canonical JSON, ``{"nodes": [[operator, operand, ...], ...], "result": operand}``. An operand is
a number, a truth value, ``"inf"``, ``"-inf"`` or ``"nan"``, one of the cell's own values ``"b"``, ``"h"``,
``"q"``, ``"kv"`` and ``"score"``, or an earlier node ``"%0"``, ``"%1"``, ... Two operators have an operand of
their own kind: ``["gather", tensor, index, ...]`` reads a tensor that the spec declares, and
``["to", value, dtype]`` casts.

Nothing but the operators of ``OPERATORS`` can be named, so a graph of an untrusted package is no code.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.spec import TensorInput

__all__ = ["CELLS", "DTYPES", "OPERATORS", "Bound", "Graph", "Node", "Operand"]

Operand = str | int | float | bool
Bound = Callable[[Mapping[str, Tensor]], Tensor]
CELLS: Final = ("b", "h", "q", "kv", "score")
DTYPES: Final = (
    *("bool", "int8", "uint8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64"),
)
_NUMBERS: Final = {"inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
# The axis that each of the cell's places lies on.
_AXES: Final = {"b": "B", "h": "H", "q": "Q", "kv": "K"}
_LONGEST: Final = 4096


def _maximum(x: Any, y: Any) -> Any:
    # where, not clamp: Inductor makes C++ that does not compile of a tensor indexed by it (torch 2.14.1).
    return torch.where(x < y, y, x)


def _minimum(x: Any, y: Any) -> Any:
    return torch.where(x > y, y, x)


def _truncated(x: Any, y: Any) -> Any:
    return torch.div(x, y, rounding_mode="trunc")


_BINARY: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "div_trunc": _truncated,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "pow": operator.pow,
    "maximum": _maximum,
    "minimum": _minimum,
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_UNARY: Final[Mapping[str, Callable[[Any], Any]]] = {
    **{name: getattr(torch, name) for name in ("abs", "ceil", "cos", "exp", "exp2", "floor", "log", "log2")},
    **{name: getattr(torch, name) for name in ("neg", "reciprocal", "round", "rsqrt", "sigmoid", "sign")},
    **{name: getattr(torch, name) for name in ("sin", "sqrt", "tanh", "trunc")},
    "not": torch.bitwise_not,
}
# Name of each operator that computes with values, and how many it takes.
OPERATORS: Final[Mapping[str, int]] = {
    **dict.fromkeys(_BINARY, 2),
    **dict.fromkeys(_UNARY, 1),
    "where": 3,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {**_BINARY, **_UNARY, "where": torch.where}


@dataclass(frozen=True, slots=True)
class Node:
    """One operation; the first argument of ``gather`` is a tensor's name, the last of ``to`` a dtype's."""

    operator: str
    args: tuple[Operand, ...]

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The arguments that are values."""
        match self.operator:
            case "gather":
                return self.args[1:]
            case "to":
                return self.args[:1]
        return self.args


@dataclass(frozen=True, slots=True)
class Graph:
    """A rule, node by node, each after those that it reads.

    Attributes:
        nodes: the operations.
        result: the operand that is the rule's value.
        inputs: the tensors that it reads.
    """

    nodes: tuple[Node, ...]
    result: Operand
    inputs: tuple[TensorInput, ...]

    @classmethod
    def parse(cls, text: str, inputs: Sequence[TensorInput], cells: Sequence[str]) -> Graph:
        """Reads and checks the text of a graph.

        Args:
            text: canonical JSON.
            inputs: the tensors that the spec declares.
            cells: those of ``CELLS`` that the rule may read.

        Raises:
            SpecError: it is no such graph, names an operator that is not allowed, or reads what is not there.
        """
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _wrong("it is no JSON", str(error)) from error
        if not isinstance(data, dict) or data.keys() != {"nodes", "result"}:
            raise _wrong("it has other fields than nodes and result", data)
        listed = data["nodes"]
        if not isinstance(listed, list) or len(listed) > _LONGEST:
            raise _wrong(f"nodes is no list of at most {_LONGEST}", type(listed).__name__)
        ranks = {given.name: len(given.dims) for given in inputs}
        nodes = tuple(_node(item, place, ranks, cells) for place, item in enumerate(listed))
        _check_operand(data["result"], len(nodes), cells)
        return cls(nodes=nodes, result=data["result"], inputs=tuple(inputs))

    def to_json(self) -> str:
        """Inverse of ``parse``."""
        nodes = [[node.operator, *node.args] for node in self.nodes]
        return json.dumps(
            {"nodes": nodes, "result": self.result}, sort_keys=True, separators=(",", ":"), allow_nan=False
        )

    def reads(self) -> frozenset[str]:
        """Those of ``CELLS`` that the nodes read."""
        operands = [operand for node in self.nodes for operand in node.operands] + [self.result]
        return frozenset(operand for operand in operands if isinstance(operand, str)) & set(CELLS)

    def gathers(self) -> Iterator[tuple[TensorInput, tuple[Operand, ...]]]:
        """Each read of a tensor, with its indices."""
        known = {given.name: given for given in self.inputs}
        for node in self.nodes:
            if node.operator == "gather":
                yield known[str(node.args[0])], node.args[1:]

    def square(self) -> bool:
        """Whether a tensor of the query axis is read at key places, so that the axes are one."""
        return any(
            axis == "Q" and index == "kv"
            for given, indices in self.gathers()
            for axis, index in zip(given.dims, indices, strict=True)
        )

    def bind(self, tensors: Mapping[str, Tensor]) -> Bound:
        """The rule as a function of the cells, whose values are integer tensors that broadcast.

        The value is a tensor that broadcasts to the cells. An index that lies outside of its axis reads the
        nearest place of it instead, so that no graph reads other memory than its tensors'.
        """
        square = self.square()
        tables = {
            given.name: _Table(given.name, tensors[given.name], given.dims, square) for given in self.inputs
        }

        def bound(cells: Mapping[str, Tensor]) -> Tensor:
            known: dict[str, Any] = {**_NUMBERS, **cells}
            for place, node in enumerate(self.nodes):
                values = [_value(operand, known) for operand in node.operands]
                if node.operator == "gather":
                    value = tables[str(node.args[0])].read(node.operands, values, cells["b"])
                elif node.operator == "to":
                    value = values[0].to(getattr(torch, str(node.args[1])))
                else:
                    value = _FUNCTIONS[node.operator](*values)
                known[f"%{place}"] = value
            result = _value(self.result, known)
            if isinstance(result, Tensor):
                return result
            return torch.full_like(cells["q"], result, dtype=_kind(result))

        return bound


class _Table:
    """A tensor that a graph reads."""

    def __init__(self, name: str, tensor: Tensor, dims: tuple[str | int, ...], square: bool) -> None:
        self.name, self.tensor, self.dims, self.square = name, tensor, dims, square
        # Read out here: Inductor cannot read a size inside a rule that it compiles into attention.
        self.sizes = tuple(tensor.shape)

    def read(self, operands: Sequence[Operand], indices: Sequence[Any], like: Tensor) -> Tensor:
        if not operands:
            return self.tensor
        places = [
            self._inside(axis, *each, like) for axis, each in enumerate(zip(operands, indices, strict=True))
        ]
        if any(place.dtype not in (torch.int32, torch.int64) for place in places):
            raise _wrong(f"the tensor '{self.name}' is indexed by something else than integers", operands)
        return torch.ops.aten.index.Tensor(self.tensor, places)  # type: ignore[no-any-return]

    def _inside(self, axis: int, operand: Operand, index: Any, like: Tensor) -> Tensor:
        dim, size = self.dims[axis], self.sizes[axis]
        place = index if isinstance(index, Tensor) else torch.full_like(like, index)
        on_key = operand == "kv" and dim == "Q" and self.square
        if on_key or dim == _AXES.get(str(operand)) or (type(operand) is int and operand == 0):
            return place
        place = torch.where(place < 0, place + size, place)
        place = torch.where(place < 0, 0, place)
        return torch.where(place < size, place, size - 1)


def _value(operand: Operand, known: Mapping[str, Any]) -> Any:
    return known[operand] if isinstance(operand, str) else operand


def _kind(value: bool | float) -> torch.dtype:
    return {bool: torch.bool, int: torch.int64}.get(type(value), torch.float32)


def _wrong(problem: str, found: object) -> SpecError:
    return SpecError(
        f"the graph of a recorded rule is wrong: {problem}",
        found=str(found)[:200],
        remedy="record the rule again with aotpack.capture",
    )


def _node(item: object, place: int, ranks: Mapping[str, int], cells: Sequence[str]) -> Node:
    if not isinstance(item, list) or not item or not isinstance(item[0], str):
        raise _wrong("a node is no list that begins with an operator", item)
    node = Node(item[0], tuple(item[1:]))
    arity = _arity(node, ranks)
    if len(node.operands) != arity or len(node.args) != arity + (node.operator in ("gather", "to")):
        raise _wrong(f"'{node.operator}' takes {arity} operands here", item)
    for operand in node.operands:
        _check_operand(operand, place, cells)
    # Of numbers alone the recorder makes a number; what Python would do with them is nobody's wish.
    if node.operator != "gather" and not any(map(_is_tensor, node.operands)):
        raise _wrong(f"'{node.operator}' is given numbers alone", item)
    if node.operator == "where" and not _is_tensor(node.args[0]):
        raise _wrong("'where' has a number for a condition", item)
    return node


def _arity(node: Node, ranks: Mapping[str, int]) -> int:
    """How many values the operator takes."""
    name, args = node.operator, node.args
    if name == "gather":
        if not args or not isinstance(args[0], str) or args[0] not in ranks:
            raise _wrong("it reads a tensor that the spec does not declare", node)
        return ranks[args[0]]
    if name == "to":
        if not args or args[-1] not in DTYPES:
            raise _wrong("it casts to no dtype", node)
        return 1
    if name not in OPERATORS:
        raise SpecError(
            f"the graph of a recorded rule calls '{name}'",
            expected=f"one of {', '.join([*sorted(OPERATORS), 'gather', 'to'])}",
            found=str(node)[:200],
            remedy="record the rule again with aotpack.capture, and distrust where the graph came from",
        )
    return OPERATORS[name]


def _is_tensor(operand: Operand) -> bool:
    return isinstance(operand, str) and operand not in _NUMBERS


def _check_operand(operand: object, place: int, cells: Sequence[str]) -> None:
    if isinstance(operand, str):
        if operand in _NUMBERS or operand in cells:
            return
        number = operand[1:]
        if number.isdecimal() and len(number) < 5 and int(number) < place and operand == f"%{int(number)}":
            return
    elif isinstance(operand, int | float) and abs(operand) < 2**63:
        return
    raise _wrong("an operand is neither a number nor a value that is there", operand)
