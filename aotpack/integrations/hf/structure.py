"""Which mask a mask function of transformers is, told by the functions that it is made of.

transformers composes a layer's mask of small closures (``transformers.masking_utils``): causal, sliding,
chunked, packed, padding. Each is known here by its code object, never by its name, so a function of
anybody else is never taken for one. ``check`` compares what is known with what transformers computes.

The only module that knows those closures; tried with transformers 5.17.0 and 5.24.0.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import HostError, UnsupportedError
from aotpack.masks import Lengths, dense
from aotpack.spec import MaskSpec

__all__ = ["Structure", "check", "padded", "structure_of"]

MaskFunction = Callable[..., Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Structure:
    """What a mask function is made of, and the tensors of this call.

    Attributes:
        causal: whether rows see earlier cells alone.
        window: cells that a row sees, in tokens; None for all.
        chunk: length of the chunks that see themselves alone, in tokens; None for no chunks.
        packed: whether rows see their own document alone.
        padded: whether keys may be padding.
        tensors: of the mask families, by the names of their inputs.
    """

    causal: bool = False
    window: int | None = None
    chunk: int | None = None
    packed: bool = False
    padded: bool = False
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    @property
    def mask(self) -> MaskSpec:
        """The mask, the same for equal structures."""
        parts = []
        if self.packed:
            parts.append(MaskSpec(family="document"))
        if self.chunk is not None:
            parts.append(MaskSpec(family="chunked", window=self.chunk))
        if self.window is not None:
            parts.append(MaskSpec(family="sliding", window=self.window))
        if not parts:
            parts.append(MaskSpec(family="causal" if self.causal else "full"))
        if self.padded:
            parts.append(MaskSpec(family="padding"))
        return parts[0] if len(parts) == 1 else MaskSpec(family="and", parts=tuple(parts))

    @property
    def name(self) -> str:
        """A short name of the mask, such as ``"sliding-padded"``."""
        plain = "chunked" if self.chunk else "sliding" if self.window else "causal" if self.causal else "full"
        return plain + "-packed" * self.packed + "-padded" * self.padded


def structure_of(function: MaskFunction) -> Structure:
    """What a mask function of transformers is made of.

    Raises:
        UnsupportedError: a part is unknown, or the parts are no mask family together.
        HostError: this transformers has other functions.
    """
    found: dict[str, Any] = {}
    remapped = False
    for kind, held in _conjuncts(function):
        remapped = remapped or kind == "remap_positions_for_packed_sequence"
        for name, value in _FIELDS[kind](held).items():
            if name in found and found[name] is not value:
                raise _refusal(function, f"two parts of the kind {kind}")
            found[name] = value
    names = ("document_ids", "real", "start")
    tensors: dict[str, Tensor] = {name: found.pop(name) for name in names if name in found}
    structure = Structure(**found, tensors=tensors)
    if not structure.causal and (structure.window or structure.chunk or structure.packed):
        raise _refusal(function, "a window, chunks or documents that are not causal")
    # Later releases compare positions in packed sequences, not indices. Positions of one document rise by
    # one, so that is the same; but chunks of positions are not chunks of indices.
    if (remapped and not structure.packed) or (structure.packed and structure.chunk):
        raise _refusal(function, "chunks, or positions that are no documents', in packed sequences")
    return structure


def padded(structure: Structure, real: Tensor | None) -> Structure:
    """The same with padding: ``real`` bool [B,K], None where it is only known that there is some."""
    tensors = {} if real is None else {"real": real}
    return replace(structure, padded=True, tensors={**structure.tensors, **tensors})


def check() -> None:
    """Compares every known function with its mask family, cell by cell.

    Raises:
        HostError: this transformers has other functions, or they compute something else.
    """
    utils, size = _utils(), 11
    start = torch.tensor([0, 3])
    real = torch.arange(size) < torch.tensor([[size], [7]])
    documents = torch.tensor([[0] * 4 + [1] * 7, [0] * 9 + [1] * 2])
    plain = utils.causal_mask_function
    _kinds()
    samples = [
        plain,
        utils.bidirectional_mask_function,
        utils.sliding_window_causal_mask_function(4),
        utils.chunked_causal_mask_function(4, start),
        utils.and_masks(plain, utils.packed_sequence_mask_function(documents)),
        utils.and_masks(plain, utils.padding_mask_function(real)),
    ]
    b, q, kv = torch.arange(2)[:, None, None, None], torch.arange(size)[:, None], torch.arange(size)
    for function in samples:
        structure = structure_of(function)
        lengths = Lengths(batch=2 if structure.tensors else 1, query=size, key=size)
        expected = function(b, torch.zeros_like(b), q, kv).expand(2, 1, size, size)
        if not torch.equal(dense(structure.mask, structure.tensors, lengths).expand_as(expected), expected):
            raise _unknown_transformers(f"other cells of the mask {structure.name}")


def _conjuncts(function: MaskFunction) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each part that must hold: the kind of function and the variables that it closes over."""
    held = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
    name = getattr(function, "__qualname__", type(function).__qualname__)
    kind = _kinds().get(function.__code__, "") if inspect.isfunction(function) else ""
    if kind == "and_masks":
        for part in held["mask_functions"]:
            yield from _conjuncts(part)
    elif kind in ("remap_positions_for_packed_sequence", "add_offsets_to_mask_function"):
        yield kind, held
        yield from _conjuncts(held["mask_function"])
    elif kind in _FIELDS:
        yield kind, held
    else:
        raise _refusal(function, kind or name)


def _no_offsets(held: Mapping[str, Any]) -> dict[str, Any]:
    if any(isinstance(held[name], Tensor) or held[name] != 0 for name in ("q_offset", "kv_offset")):
        raise _refusal(held["mask_function"], "queries that continue a cache")
    return {}


_FIELDS: Final[Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]]] = {
    "causal_mask_function": lambda held: {"causal": True},
    "bidirectional_mask_function": lambda held: {},
    "sliding_window_overlay": lambda held: {"window": int(held["sliding_window"])},
    "chunked_overlay": lambda held: {"chunk": int(held["chunk_size"]), "start": held["left_padding"].long()},
    "padding_mask_function": lambda held: {"padded": True, "real": held["padding_mask"]},
    "packed_sequence_mask_function": lambda held: {
        "packed": True,
        "document_ids": held["packed_sequence_mask"].long(),
    },
    "remap_positions_for_packed_sequence": lambda held: {},
    "add_offsets_to_mask_function": _no_offsets,
}
_PLAIN: Final = ("causal_mask_function", "bidirectional_mask_function")
# Functions that make a mask function, with any arguments that they take.
_MAKERS: Final[Mapping[str, tuple[Any, ...]]] = {
    "and_masks": (),
    "or_masks": (),
    "sliding_window_overlay": (1,),
    "chunked_overlay": (1, None),
    "padding_mask_function": (None,),
    "packed_sequence_mask_function": (None,),
    "remap_positions_for_packed_sequence": (None, None),
    "add_offsets_to_mask_function": (None, 0, 0),
}
# Not in transformers 5.17.
_LATER: Final = frozenset({"remap_positions_for_packed_sequence"})


@functools.cache
def _kinds() -> Mapping[CodeType, str]:
    """The kind of mask function by its code."""
    utils = _utils()
    try:
        kinds = {getattr(utils, name).__code__: name for name in _PLAIN}
        for name, arguments in _MAKERS.items():
            if name not in _LATER or hasattr(utils, name):
                kinds[getattr(utils, name)(*arguments).__code__] = name
    except (AttributeError, TypeError) as error:
        raise _unknown_transformers(str(error)) from error
    return kinds


def _utils() -> Any:
    import transformers.masking_utils

    return transformers.masking_utils


def _refusal(function: MaskFunction, what: str) -> UnsupportedError:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return UnsupportedError(
        f"the mask function '{name}' of this model is not one that aotpack knows",
        expected="causal, sliding or chunked layers, with padding or packed position_ids; or no mask at all",
        found=what,
        remedy='use attn_implementation="sdpa" for this model, or call aotpack with a rule of your own',
    )


def _unknown_transformers(found: str) -> HostError:
    import transformers

    return HostError(
        "this transformers makes masks in another way than those that aotpack knows",
        expected="transformers 5.17 to 5.24",
        found=f"transformers {transformers.__version__}: {found}",
        remedy="use a transformers that aotpack supports",
    )
