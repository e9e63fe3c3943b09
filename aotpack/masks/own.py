"""Mask rules of a user's own, ``"module:function"``; imported when a package is built, never on a node."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from torch import Tensor

from aotpack.errors import SpecError
from aotpack.masks.family import Family, Input, Lengths, Rule
from aotpack.own import function_of
from aotpack.spec import MaskSpec

__all__ = ["NO_HEAD", "own_family"]

_OPERATORS: Final = (
    *("add", "and", "bool", "eq", "float", "floordiv", "ge", "getitem", "gt", "index", "int", "invert", "le"),
    *(
        "lt",
        "mod",
        "mul",
        "ne",
        "neg",
        "or",
        "pow",
        "radd",
        "rand",
        "rfloordiv",
        "rmod",
        "rmul",
        "ror",
        "rsub",
    ),
    *("rtruediv", "rxor", "sub", "truediv", "xor"),
)


class _NoHead:
    """Stands for the head index in a mask rule: whoever reads it learns that masks are one for all heads."""

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_heads()

    __hash__ = None  # type: ignore[assignment]


def _refuse_heads(*args: Any) -> NoReturn:
    raise SpecError(
        "the mask differs between heads",
        expected="a rule that does not read h",
        remedy="build one spec for each group of heads, or hide cells in a score rule",
    )


for _name in _OPERATORS:
    setattr(_NoHead, f"__{_name}__", _refuse_heads)
NO_HEAD: Final = _NoHead()


def own_family(mask: MaskSpec) -> Family:
    """The family of a rule of the user's own, by what the spec declares; the function is not imported."""
    declared = mask.inputs or ()
    return Family(
        name=mask.family,
        inputs=tuple(Input.declared(given) for given in declared),
        optional=frozenset({"block_size", "inputs", "source"}),
        drafts=any("N" in given.dims for given in declared),
        required=frozenset({"block_size"} if any("N" in given.dims for given in declared) else ()),
        rule=_rule,
    )


def _rule(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    function = function_of(mask.family, mask.source)
    sizes = {"query_len": lengths.query, "key_len": lengths.key}
    asked = {n: sizes[n] for n in inspect.signature(function).parameters if n in sizes and n not in inputs}
    arguments = {given.name: inputs[given.name] for given in mask.inputs or ()} | asked
    return lambda b, q, kv: function(b, NO_HEAD, q, kv, **arguments)
