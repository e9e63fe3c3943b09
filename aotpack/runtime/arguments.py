"""Arguments of ``Attention.block_mask``: checked, and turned into tensors and lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from aotpack.errors import InputError
from aotpack.masks import Family, Input, Lengths
from aotpack.scores import Family as ScoreFamily
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["LENGTH_ARGUMENTS", "check_positions", "read_arguments", "read_score", "read_tensor"]

# The argument that says how long an axis is.
LENGTH_ARGUMENTS: Final = {"T": "context_len", "Q": "query_len", "K": "context_len"}


def read_arguments(
    family: Family,
    mask: MaskSpec,
    device: torch.device,
    tensors: Mapping[str, Tensor | None],
    given: Mapping[str, int | None],
) -> tuple[dict[str, Tensor], Lengths]:
    """The rule's tensors in the family's order, contiguous, and the lengths.

    Args:
        family: of the mask.
        mask: its spec.
        device: where the tensors must be.
        tensors: by name; None counts as absent.
        given: ``query_len`` and ``context_len``; what follows from the tensors may be left out.

    Raises:
        InputError: an argument is missing, unknown, or does not fit the family or the others.
    """
    _check_names(family, tensors, given)
    sizes: dict[str | int, int] = {}
    read = {i.name: read_tensor(i, tensors[i.name], device, sizes) for i in family.inputs}
    for axis in family.carried:
        name = LENGTH_ARGUMENTS[axis]
        length = given[name]
        if sizes.setdefault(axis, length or 0) != length:
            raise InputError(
                f"{name} does not fit the tensors", expected=f"{axis}={sizes[axis]}", found=length
            )
    lengths = family.lengths(mask, sizes)
    _check_lengths(family, lengths, sizes, given)
    return read, lengths


def read_score(
    family: ScoreFamily | None,
    spec: AttentionSpec,
    device: torch.device,
    tensors: Mapping[str, Tensor],
    lengths: Lengths,
    drafts: bool,
) -> list[Tensor]:
    """The score's tensors in the family's order, contiguous.

    Args:
        family: of the score; None where the spec has none.
        spec: of the attention.
        device: where the tensors must be.
        tensors: by name.
        lengths: of the call; ``batch`` is q's.
        drafts: whether the query axis is made of blocks that anchors draft.

    Raises:
        InputError: a tensor is missing, unknown, or does not fit the spec or the call.
    """
    inputs = () if family is None else family.inputs
    needed = {given.name for given in inputs}
    if needed != tensors.keys():
        raise InputError(
            "attention was called with the wrong tensors for its score",
            expected=", ".join(sorted(needed)) or "none",
            found=", ".join(sorted(tensors)) or "none",
            remedy="pass each by its name, beside q, k, v and the mask",
        )
    sizes: dict[str | int, int] = {"B": lengths.batch, "H": spec.heads, "Q": lengths.query, "K": lengths.key}
    if drafts:
        sizes |= {"N": lengths.query // spec.mask.draft_size, "T": lengths.key - lengths.query}
    return [read_tensor(Input.declared(given), tensors[given.name], device, sizes) for given in inputs]


def check_positions(family: Family, tensors: Mapping[str, Tensor], lengths: Lengths) -> None:
    """Values that are places on an axis are inside it, except in blocks that are not kept. Reads them."""
    for given in family.inputs:
        if given.positions is None:
            continue
        length = family.end_of(given, tensors, lengths)
        values = tensors[given.name]
        wrong = (values < 0) | (values >= length)
        if "keep" in tensors:
            wrong = wrong & tensors["keep"]
        if bool(wrong.any()):
            raise InputError(
                f"{given.name} are out of range",
                expected=f"positions from 0 to {length - 1}, the context being {length} tokens long",
                found=f"{int(wrong.sum())} others, for example {int(values[wrong][0])}",
                remedy="sample anchors inside the context, or clear keep for blocks that are padding"
                if "keep" in tensors
                else "sample positions inside the context",
            )


def _check_names(
    family: Family, tensors: Mapping[str, Tensor | None], given: Mapping[str, int | None]
) -> None:
    needed = {i.name for i in family.inputs} | {LENGTH_ARGUMENTS[axis] for axis in family.carried}
    found = {name for name, value in {**tensors, **given}.items() if value is not None}
    if not needed <= found <= needed | given.keys():
        raise InputError(
            f"block_mask of the family '{family.name}' was called with the wrong arguments",
            expected=", ".join(sorted(needed)) or "none",
            found=", ".join(sorted(found)) or "none",
        )
    for name, length in sorted(given.items()):
        if length is not None and (type(length) is not int or length < 1):
            raise InputError(f"{name} is wrong", expected="a positive number of tokens", found=repr(length))


def read_tensor(
    given: Input, tensor: Tensor | None, device: torch.device, sizes: dict[str | int, int]
) -> Tensor:
    """One tensor, contiguous, its axes noted in ``sizes``; an axis of batch entries may be left out.

    Raises:
        InputError: another dtype, shape or device than declared, or sizes that other tensors contradict.
    """
    if not isinstance(tensor, Tensor):
        raise InputError(f"{given.name} is no tensor", expected="a tensor", found=type(tensor).__name__)
    if tensor.device != device:
        raise InputError(
            f"{given.name} is on another device than this attention",
            expected=device,
            found=tensor.device,
            remedy=f"move it, or take the attention of a pack loaded with device='{tensor.device}'",
        )
    if tensor.dtype != given.dtype:
        raise InputError(
            f"{given.name} has the wrong dtype", expected=given.dtype, found=tensor.dtype, remedy="cast it"
        )
    if given.dims[:1] == ("B",) and 0 < tensor.dim() == len(given.dims) - 1:
        tensor = tensor.unsqueeze(0)
    shape = list(tensor.shape)
    axes = f"[{', '.join(map(str, given.dims))}]"
    if len(shape) != len(given.dims) or 0 in shape:
        raise InputError(f"{given.name} has the wrong shape", expected=f"{axes}, no size 0", found=shape)
    for axis, size in zip(given.dims, shape, strict=True):
        if sizes.setdefault(axis, axis if isinstance(axis, int) else size) != size:
            raise InputError(
                f"{given.name} does not fit the other inputs",
                expected=f"{axes} with {axis}={sizes[axis]}",
                found=shape,
            )
    return tensor.contiguous()


def _check_lengths(
    family: Family, lengths: Lengths, sizes: Mapping[str | int, int], given: Mapping[str, int | None]
) -> None:
    known = {"Q": lengths.query, "K": lengths.key}
    for axis, length in known.items():
        if sizes.get(axis, length) != length:
            raise InputError(
                f"the tensors of the mask '{family.name}' do not fit its axes",
                expected=f"{axis}={length}",
                found=f"{axis}={sizes[axis]}",
            )
    context = lengths.key - lengths.query if family.drafts else lengths.key
    for name, expected in (("query_len", lengths.query), ("context_len", context)):
        if given[name] not in (None, expected):
            raise InputError(f"{name} does not fit the tensors", expected=expected, found=given[name])
    if family.unrolled and lengths.key % lengths.query:
        raise InputError(
            f"the key axis of the mask '{family.name}' holds one part for each step of the unroll",
            expected=f"a multiple of the query length {lengths.query}",
            found=lengths.key,
        )
