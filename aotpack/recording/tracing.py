"""What a mask or score function computes, recorded operator by operator for one cell.

The function is called once with the cell's indices as 0-d tensors, as flex_attention calls it, and the ATen
operators that it runs are noted by a dispatch mode. Nothing is computed: each operator's result is a tensor
of the right dtype and no meaning, so that a rule which looks at a value is found out.

The only module of this package that uses ``torch.utils._python_dispatch`` (tried with torch 2.11.0, 2.14.1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from aotpack.errors import SpecError
from aotpack.graph import OPERATORS
from aotpack.recording.expressions import Expression, apply, cast, cell, constant, gather, tensors_of

__all__ = ["Recorded", "record", "title"]

_RENAMED: Final[Mapping[str, str]] = {
    **{f"bitwise_{name}": name for name in ("and", "or", "xor", "not")},
    **{f"i{name}": name for name in ("and", "or", "xor")},
    "true_divide": "div",
}
_SAME: Final = frozenset({"alias", "clone", "detach", "contiguous", "lift_fresh_copy"})
_FILLED: Final[Mapping[str, Any]] = {
    "ones": 1,
    "zeros": 0,
    "new_ones": 1,
    "new_zeros": 0,
    "ones_like": 1,
    "zeros_like": 0,
}
_SUPPORTED: Final = ", ".join(
    sorted({*OPERATORS, "clamp", "gather by [...]", "masked_fill", "relu", "rsub", "to"})
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """A function's value for a cell, and the tensors that it reads by name."""

    expression: Expression
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class _Table:
    """A tensor with axes, of which the first are already indexed."""

    name: str
    indices: tuple[Expression, ...] = ()


def record(
    function: Callable[..., Any], cells: Sequence[str], names: Callable[[Tensor], str], like: Tensor
) -> Recorded:
    """Calls a mask or score function on symbols.

    Args:
        function: as flex_attention takes it.
        cells: its arguments, of ``aotpack.graph.CELLS``.
        names: the name of a tensor that the function reads, by the tensor; unique.
        like: a tensor of the device, and of the fake mode, that the function is called on.

    Raises:
        SpecError: it computes with an operator that a graph cannot have, or reads a tensor's value.
    """
    recorder = _Recorder(title(function), names, like)
    with torch.no_grad(), recorder, _Indexing(recorder):
        arguments = [
            recorder.made(cell(name), torch.float32 if name == "score" else torch.int64) for name in cells
        ]
        value = function(*arguments)
        expression = recorder.value(value)
    used = sorted(tensors_of(expression))
    return Recorded(expression=expression, tensors={name: recorder.tensors[name] for name in used})


def title(function: Any) -> str:
    """What messages call a function."""
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


class _Indexing(TorchFunctionMode):
    """Indexing by a cell's index: Python's own would ask for its value."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__getitem__:
            return self.recorder.indexed(args[0], args[1] if isinstance(args[1], tuple) else (args[1],))
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    def __init__(self, title: str, names: Callable[[Tensor], str], like: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.title, self.names, self.like = title, names, like
        self._making = False
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[int, Expression | _Table] = {}
        # Whose id is noted must live as long as the note.
        self._alive: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # prim is what a fake tensor's own properties ask for, such as its device.
        if self._making or func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.rpartition("::")[2]
        inplace = func._schema.is_mutable
        plain = name.strip("_") if inplace or name.startswith("__") else name
        if func.namespace != "aten":
            raise self._refusal(func)
        if plain == "lift_fresh":
            return self._literal(args[0])
        if plain == "select" and args[1] == 0:
            return self.indexed(args[0], (args[2],))
        if plain == "index" and None not in args[1]:
            return self.indexed(args[0], tuple(args[1]))
        result = self._computed(func, plain, args, kwargs or {})
        if inplace:
            if any(args[0] is tensor for tensor in self.tensors.values()):
                raise self._refusal(func, "it changes a tensor that it closes over")
            self._known[id(args[0])] = self._known.pop(id(result))
            return args[0]
        return result

    def made(self, value: Expression | _Table, dtype: torch.dtype, shape: Sequence[int] = ()) -> Tensor:
        """A tensor that stands for a value."""
        self._making = True
        tensor = self.like.new_empty((), dtype=dtype).expand(tuple(shape))
        self._making = False
        self._known[id(tensor)] = value
        self._alive.append(tensor)
        return tensor

    def value(self, tensor: Any) -> Expression:
        """The expression of an operand."""
        if isinstance(tensor, bool | int | float):
            return constant(tensor)
        if not isinstance(tensor, Tensor):
            raise SpecError(
                f"the function '{self.title}' cannot be recorded",
                expected="tensors",
                found=repr(tensor)[:100],
            )
        known = self._known.get(id(tensor)) or self._declared(tensor)
        if isinstance(known, Expression):
            return known
        if tensor.shape == (1,):
            return gather(known.name, (*known.indices, constant(0)))
        raise SpecError(
            f"the function '{self.title}' computes with the whole tensor '{known.name}'",
            expected="one element of it, by an index for each axis",
            found=f"a tensor of shape {list(tensor.shape)}",
            remedy="compute the tensor before the function is made, and index it inside",
        )

    def indexed(self, tensor: Tensor, items: tuple[Any, ...]) -> Tensor:
        """``tensor[items]``: an element, or what is left when the first axes are indexed."""
        while items and (items[-1] is Ellipsis or items[-1] == slice(None)):
            items = items[:-1]
        table = self._known.get(id(tensor)) or self._declared(tensor)
        if isinstance(table, Expression) or not all(self._is_index(item) for item in items):
            raise SpecError(
                f"the function '{self.title}' indexes a tensor in a way that cannot be recorded",
                expected="integers and integer values of the cell, from the first axis on",
                found=f"a tensor of shape {list(tensor.shape)} indexed by {items!r}"[:200],
                remedy="bring the tensor into that form before the function is made",
            )
        indices = (*table.indices, *(self.value(item) for item in items))
        rest = tensor.shape[len(items) :]
        value = _Table(table.name, indices) if len(rest) else gather(table.name, indices)
        return self.made(value, tensor.dtype, rest)

    def _is_index(self, item: Any) -> bool:
        if isinstance(item, Tensor):
            return item.dtype in (torch.int32, torch.int64) and item.dim() == 0
        return type(item) is int

    def _declared(self, tensor: Tensor) -> Expression | _Table:
        """A tensor that the function did not make: an input of the rule."""
        name = self.names(tensor)
        self.tensors[name] = tensor
        found = _Table(name) if tensor.dim() else gather(name, ())
        self._known[id(tensor)] = found
        self._alive.append(tensor)
        return found

    def _literal(self, tensor: Tensor) -> Tensor:
        if tensor.dim():
            raise SpecError(
                f"the function '{self.title}' makes a tensor of its own",
                expected="tensors made outside of it, or plain numbers",
                found=f"a new tensor of shape {list(tensor.shape)}",
                remedy="make the tensor before the function, which then closes over it",
            )
        # Made of a Python number a moment ago, it is no tensor of the dispatcher yet.
        return self.made(constant(tensor.item()), tensor.dtype)

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        if name == "_local_scalar_dense":
            raise SpecError(
                f"the function '{self.title}' reads the value of a tensor",
                expected="tensor operations, which any value may go through",
                found=".item(), bool(), int() or an if over a tensor",
                remedy="use torch.where and the operators & | ~",
            )
        if name in _FILLED or name in ("full", "new_full", "full_like", "scalar_tensor"):
            return self._filled(func, name, args, kwargs)
        dtype = self._dtype(func, args, kwargs)
        operands = [self.value(arg) if arg is not None else None for arg in args if not _is_option(arg)]
        if name in _SAME:
            return self.made(self.value(args[0]), dtype)
        if name == "_to_copy":
            value, same = self.value(args[0]), args[0].dtype == dtype
            return self.made(value if same else cast(value, _name(dtype)), dtype)
        expression = self._expression(name, operands, kwargs, args, dtype)
        if expression is None:
            raise self._refusal(func)
        return self.made(expression, dtype)

    def _expression(
        self,
        name: str,
        operands: list[Any],
        kwargs: Mapping[str, Any],
        args: tuple[Any, ...],
        dtype: torch.dtype,
    ) -> Expression | None:
        """The value of an operator; None where a graph cannot have it."""
        name = _RENAMED.get(name, name)
        # An operand of the result's dtype may come out as it is.
        keeps = all(not isinstance(arg, Tensor) or arg.dtype == dtype for arg in args)
        if (alpha := kwargs.get("alpha", 1)) != 1:
            scaled = 0 if name == "rsub" else 1
            operands[scaled] = apply("mul", operands[scaled], constant(alpha), keeps=keeps)
        if (mode := kwargs.get("rounding_mode")) is not None:
            name = "floor_divide" if mode == "floor" else "div_trunc"
        if name.startswith("logical_"):
            name = name.removeprefix("logical_")
            operands = [
                operand if arg.dtype == torch.bool else apply("ne", operand, constant(0))
                for operand, arg in zip(operands, args, strict=True)
            ]
        name, operands = _rewritten(name, operands)
        return apply(name, *operands, keeps=keeps) if OPERATORS.get(name) == len(operands) else None

    def _filled(self, func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        of = args[0] if args and isinstance(args[0], Tensor) else None
        size: Sequence[int] = args[0] if of is None else args[1] if len(args) > 1 else of.shape
        if name == "scalar_tensor":
            size = ()
        elif name == "full_like" and of is not None:
            size = of.shape
        filled = _FILLED.get(name, args[-1])
        if len(size) or isinstance(filled, Tensor):
            raise self._refusal(func, "it makes a tensor of more than one element")
        inferred = of.dtype if of is not None else torch.get_default_dtype()
        if of is None and name not in _FILLED:
            inferred = {bool: torch.bool, int: torch.int64}.get(type(filled), inferred)
        dtype = kwargs.get("dtype") or inferred
        return self.made(cast(constant(filled), _name(dtype)), dtype)

    def _dtype(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype:
        """Of the result, which torch says without a value: on the device that holds none."""

        def empty(arg: Any) -> Any:
            return torch.empty((), dtype=arg.dtype, device="meta") if isinstance(arg, Tensor) else arg

        options = {k: empty(v) for k, v in kwargs.items() if k not in ("device", "pin_memory", "layout")}
        try:
            found = func(*map(empty, args), **options)
        except Exception as error:
            raise self._refusal(func, str(error).partition("\n")[0]) from error
        if not isinstance(found, Tensor) or found.dim():
            raise self._refusal(func)
        return found.dtype

    def _refusal(self, func: Any, why: str | None = None) -> SpecError:
        return SpecError(
            f"the function '{self.title}' calls {func}, which cannot be recorded",
            expected=f"operators of single cells: {_SUPPORTED}",
            found=why or str(func),
            remedy="compute it before the function is made, or write the rule with these operators",
        )


def _is_option(arg: Any) -> bool:
    return not (arg is None or isinstance(arg, Tensor | bool | int | float))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rewritten(name: str, operands: list[Any]) -> tuple[str, list[Any]]:
    """Operators that are others with their operands elsewhere, as those."""
    match name, operands:
        case "lt" | "le", [left, right]:
            return name.replace("l", "g"), [right, left]
        case "rsub", [left, right]:
            return "sub", [right, left]
        case "relu", [value]:
            return "maximum", [value, constant(0)]
        case "masked_fill", [value, condition, filled]:
            return "where", [condition, filled, value]
        case "clamp", [value, low, high] if low is not None and high is not None:
            return "minimum", [apply("maximum", value, low), high]
        case "clamp", [value, None, high]:
            return "minimum", [value, high]
        case "clamp" | "clamp_min", [value, low, *_]:
            return "maximum", [value, low]
        case "clamp_max", _:
            return "minimum", operands
    return name, operands
