"""The axes of a rule's tensors, from how the rule indexes them and how long they are."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from aotpack.errors import SpecError
from aotpack.recording.expressions import Expression, parts
from aotpack.spec import TensorInput

__all__ = ["declared"]

_AXES = {"b": "B", "h": "H", "q": "Q", "kv": "K"}


def declared(
    function: str, expression: Expression, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> tuple[TensorInput, ...]:
    """The tensors as a spec declares them.

    An axis that is indexed by b, h, q or kv itself and is as long as that axis of the attention is ``"B"``,
    ``"H"``, ``"Q"`` or ``"K"``; one that q and kv both index is ``"Q"``, and then every key axis is. Any
    other axis is of its own and of any length.

    Args:
        function: that the expression was recorded from.
        expression: the rule.
        tensors: those that it reads.
        sizes: of ``"B"``, ``"H"``, ``"Q"`` and ``"K"``.

    Raises:
        SpecError: a tensor is shorter than the axis that indexes it, or of a dtype that no spec declares.
    """
    free = 0
    found: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        found[name] = []
        for place, size in enumerate(tensor.shape):
            axes = _indexing(expression, name, place)
            _check_size(function, name, place, size, axes, sizes)
            fitting = [axis for axis in axes if sizes[axis] == size]
            if len(fitting) == 1 or fitting == ["Q", "K"]:
                found[name].append("+".join(fitting))
            else:
                found[name].append(f"X{free}")
                free += 1
    square = any("Q+K" in dims for dims in found.values())
    merged = {"Q+K": "Q", "K": "Q"} if square else {}
    return tuple(
        TensorInput(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            dims=tuple(merged.get(axis, axis) for axis in found[name]),
            gradient=tensor.requires_grad,
        )
        for name, tensor in tensors.items()
    )


def _indexing(expression: Expression, name: str, place: int) -> list[str]:
    """The axes of attention whose own index is used there, in a fixed order."""
    reads = [part.args[place] for part in parts(expression) if part.kind == "gather" and part.name == name]
    used = {read.name for read in reads if read.kind == "cell"}
    return [axis for cell, axis in _AXES.items() if cell in used]


def _check_size(
    function: str, name: str, place: int, size: int, axes: list[str], sizes: Mapping[str, int]
) -> None:
    words = {"B": "the batch", "H": "the heads", "Q": "the query axis", "K": "the key axis"}
    for axis in axes:
        if size < sizes[axis]:
            raise SpecError(
                f"the function '{function}' reads the tensor '{name}' past its end",
                expected=f"an axis {place} as long as {words[axis]}, {sizes[axis]}",
                found=size,
                remedy=f"expand '{name}', or leave the index out",
            )
