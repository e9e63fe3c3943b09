"""What a rule computes for one cell, as an expression that is brought to one form while it is built."""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aotpack.graph import Node, Operand

__all__ = ["Expression", "apply", "cast", "cell", "constant", "gather", "nodes_of", "parts", "tensors_of"]

_COMMUTATIVE: Final = frozenset({"add", "mul", "eq", "ne", "and", "or", "xor"})
# Folded when all operands are numbers, in Python, whose integers and floats are wide enough.
_FOLDED: Final[Mapping[str, Callable[..., Any]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "floor_divide": operator.floordiv,
    "remainder": operator.mod,
    "maximum": max,
    "minimum": min,
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "ge": operator.ge,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "abs": abs,
    "exp": math.exp,
    "exp2": math.exp2,
    "log": math.log,
    "neg": operator.neg,
    "not": lambda x: not x if isinstance(x, bool) else ~x,
    "sqrt": math.sqrt,
}


@dataclass(frozen=True, slots=True)
class Expression:
    """A value of a cell; two with one ``key`` are the same value.

    Attributes:
        kind: ``"cell"``, ``"constant"``, ``"gather"``, ``"to"`` or an operator of ``aotpack.graph``.
        name: of the cell's own value, of the tensor or of the dtype.
        value: the number of a constant.
        args: the operands.
        key: the canonical text, or a digest of it.
    """

    kind: str
    name: str = ""
    value: Any = None
    args: tuple[Expression, ...] = ()
    key: str = field(init=False)

    def __post_init__(self) -> None:
        text = f"{self.kind}:{self.name}:{self.value!r}({','.join(arg.key for arg in self.args)})"
        if len(text) > 96:
            text = hashlib.sha256(text.encode()).hexdigest()
        object.__setattr__(self, "key", text)


def cell(name: str) -> Expression:
    """One of the cell's own values: b, h, q, kv or score."""
    return Expression("cell", name=name)


def constant(value: bool | float) -> Expression:
    """A number or truth value."""
    return Expression("constant", value=value)


def gather(name: str, indices: tuple[Expression, ...]) -> Expression:
    """An element of a tensor; a tensor without axes has no indices."""
    return Expression("gather", name=name, args=indices)


def cast(value: Expression, dtype: str) -> Expression:
    """A value in another dtype; of a constant, the constant."""
    if value.kind == "constant":
        kind: Any = bool if dtype == "bool" else int if "int" in dtype else float
        if kind is float or math.isfinite(value.value):
            return constant(kind(value.value))
    return Expression("to", name=dtype, args=(value,))


def apply(name: str, *args: Expression, keeps: bool = True) -> Expression:
    """An operator's value.

    Args:
        name: one of ``aotpack.graph.OPERATORS``.
        args: its operands.
        keeps: whether a value of the first operand's, or of the second's, kind comes out: only then may an
            operation that changes nothing be left out.
    """
    if name in _FOLDED and all(arg.kind == "constant" for arg in args):
        try:
            return constant(_FOLDED[name](*(arg.value for arg in args)))
        except (ArithmeticError, TypeError, ValueError):
            return Expression(name, args=args)
    if name == "where" and args[0].kind == "constant":
        return args[1] if args[0].value else args[2]
    if name in _COMMUTATIVE:
        args = tuple(sorted(args, key=lambda arg: (arg.kind == "constant", arg.key)))
    if name == "ge" and args[0].kind == "cell" and args[0].name != "score" and args[1].value == 0:
        return constant(True)
    if keeps and (same := _unchanged(name, args)) is not None:
        return same
    return Expression(name, args=args)


def _unchanged(name: str, args: tuple[Expression, ...]) -> Expression | None:
    last = args[-1].value if args[-1].kind == "constant" else None
    neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1, "floor_divide": 1}
    if last is not None and name in neutral and last is not True and last is not False:
        return args[0] if last == neutral[name] else None
    if (name == "and" and last is True) or (name == "or" and last is False):
        return args[0]
    if (name == "and" and last is False) or (name == "or" and last is True):
        return args[1]
    if name in ("and", "or") and args[0].key == args[1].key:
        return args[0]
    return None


def parts(expression: Expression, seen: set[str] | None = None) -> Iterator[Expression]:
    """The expression's parts and itself, each once, operands first."""
    seen = set() if seen is None else seen
    if expression.key in seen:
        return
    seen.add(expression.key)
    for arg in expression.args:
        yield from parts(arg, seen)
    yield expression


def tensors_of(expression: Expression) -> list[str]:
    """Names of the tensors that it reads, in the order that it reads them."""
    return list(dict.fromkeys(part.name for part in parts(expression) if part.kind == "gather"))


def nodes_of(expression: Expression) -> tuple[tuple[Node, ...], Operand]:
    """The nodes of its graph, and the operand that is its value."""
    nodes: list[Node] = []
    known: dict[str, Operand] = {}
    for part in parts(expression):
        if part.kind == "cell":
            known[part.key] = part.name
        elif part.kind == "constant":
            known[part.key] = _number(part.value)
        else:
            operands: tuple[Operand, ...] = tuple(known[arg.key] for arg in part.args)
            if part.kind == "gather":
                operands = (part.name, *operands)
            elif part.kind == "to":
                operands = (*operands, part.name)
            known[part.key] = f"%{len(nodes)}"
            nodes.append(Node(part.kind, operands))
    return tuple(nodes), known[expression.key]


def _number(value: Any) -> Operand:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    number: Operand = json.loads(json.dumps(value))
    return number
