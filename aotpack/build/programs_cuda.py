"""The programs of a CUDA variant: flex attention with the mask's rule inside, and the block lists it takes.

``forward`` and ``backward`` come in specialisations, tighter shape classes beside the general one; the
runtime takes the tightest that fits. They share one ``block_mask`` program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from aotpack.build.blocks import BLOCK, MASK_TENSORS, classify, inside, lists, mask_arguments, mask_lengths
from aotpack.build.programs import Program
from aotpack.masks import Lengths, family_of
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["SPECIALISATIONS", "Specialisation", "attention_program", "block_mask_program"]

# Declared maxima decide the width of indices: Inductor takes 64 bits where they say that a tensor may pass
# 2**31 elements, and 32 bits where none is declared. Their product must stay below 1e20, which counts as none.
_BATCH: Final = (1 << 16) - 1
_LENGTH: Final = 1 << 22
_INT32: Final = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Specialisation:
    """A shape class, under the name and with the bounds that the manifest's ``Program`` records."""

    name: str
    bounds: Mapping[str, int]

    @property
    def divisor(self) -> int:
        """What the query and key lengths are multiples of."""
        return self.bounds.get("divisor", 1)

    @property
    def narrow(self) -> bool:
        """Whether 32-bit indices reach every element of every tensor."""
        return self.bounds.get("max_elements", _INT32 + 1) <= _INT32


_ANY: Final = {"max_batch": _BATCH, "max_length": _LENGTH}
# The tightest first: the runtime takes the first that fits.
SPECIALISATIONS: Final = (
    Specialisation(name="div128", bounds={**_ANY, "divisor": BLOCK, "max_elements": _INT32}),
    Specialisation(name="general", bounds=_ANY),
)


class _FlexAttention(torch.nn.Module):
    def __init__(self, spec: AttentionSpec, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.family = family_of(spec.mask)
        # Short queries would otherwise take the flex-decoding kernel, a second code path.
        self.options = {**options, "FORCE_USE_FLEX_ATTENTION": True}

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        (q, k, v), lists = args[:3], args[3 : 3 + len(MASK_TENSORS)]
        named = dict(zip((i.name for i in self.family.inputs), args[3 + len(MASK_TENSORS) :], strict=True))
        lengths = Lengths(batch=lists[0].shape[0], query=q.shape[2], key=k.shape[2])
        rule = self.family.rule(self.spec.mask, named, lengths)
        mask = BlockMask(
            seq_lengths=(lengths.query, lengths.key),
            **dict(zip(MASK_TENSORS, lists, strict=True)),
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=lambda b, h, q_index, kv_index: rule(b, q_index, kv_index),
        )
        out, lse = flex_attention(
            q, k, v, block_mask=mask, scale=self.spec.scale, enable_gqa=True, return_lse=True,
            kernel_options=self.options,
        )  # fmt: skip
        return out, lse


def attention_program(
    spec: AttentionSpec, specialisation: Specialisation, options: Mapping[str, Any]
) -> Program:
    """Inputs q, k, v, the block lists and the rule's own inputs; outputs out and log-sum-exp.

    Args:
        spec: what to compile.
        specialisation: the shapes it is compiled for.
        options: tile sizes, as ``flex_attention``'s ``kernel_options``.
    """
    family, dims = family_of(spec.mask), _dims(specialisation)
    sizes = _sizes(spec.mask, specialisation.divisor)
    dtype = getattr(torch, spec.dtype)
    args: list[Tensor] = []
    shapes: list[dict[int, Any]] = []

    def add(axes: tuple[str | int, ...], dtype: torch.dtype) -> None:
        shape = [sizes[axis] if isinstance(axis, str) else axis for axis in axes]
        args.append(torch.ones(shape, dtype=dtype))
        shapes.append({i: dims[axis] for i, axis in enumerate(axes) if isinstance(axis, str)})

    add(("B", spec.heads, "Q", spec.head_dim), dtype)
    add(("B", spec.kv_heads, "K", spec.head_dim), dtype)
    add(("B", spec.kv_heads, "K", spec.value_dim), dtype)
    masks = "B" if family.batched else 1
    for rows, columns in (("Qb", "Kb"),) * 2 + (("Kb", "Qb"),) * 2:
        add((masks, 1, rows), torch.int32)
        add((masks, 1, rows, columns), torch.int32)
    for given in family.inputs:
        add(given.dims, given.dtype)
    return Program(
        module=_FlexAttention(spec, options),
        args=tuple(args),
        dynamic_shapes=tuple(shapes),
        inputs=(
            *("q", "k", "v"),
            *(f"mask.{name}" for name in MASK_TENSORS),
            *(f"input.{given.name}" for given in family.inputs),
        ),
        outputs=("out", "lse"),
    )


def _sizes(mask: MaskSpec, divisor: int = 1) -> dict[str, int]:
    """Example sizes of the axes. Those of any length are odd, lest tracing take a divisor for granted."""
    query, context = (768, 384) if divisor > 1 else (777, 395)
    anchors = -(-query // (mask.block_size or 1))
    if divisor == 1 and mask.block_size:
        query = anchors * mask.block_size
    key = query + context
    blocks = {"Qb": -(-query // BLOCK), "Kb": -(-key // BLOCK)}
    return {"B": 3, "Q": query, "K": key, "N": anchors, "T": context, **blocks}


def _dims(specialisation: Specialisation) -> dict[str, Any]:
    """One symbol for each axis, since each symbol is an argument of each kernel."""
    blocks = {axis: Dim(axis, min=1, max=_LENGTH // BLOCK) for axis in ("Qb", "Kb")}
    lengths: dict[str, Any] = {axis: Dim(axis, min=1, max=_LENGTH) for axis in ("Q", "K")}
    if specialisation.divisor == BLOCK:
        lengths = {"Q": BLOCK * blocks["Qb"], "K": BLOCK * blocks["Kb"]}
    others = {axis: Dim(axis, min=1, max=_LENGTH) for axis in ("N", "T")}
    return {"B": Dim("B", min=1, max=_BATCH), **lengths, **blocks, **others}


class _BlockLists(torch.nn.Module):
    def __init__(self, mask: MaskSpec) -> None:
        super().__init__()
        self.mask = mask
        self.family = family_of(mask)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        inputs, lengths = mask_lengths(self.family, self.mask, args)
        rule = inside(self.family.rule(self.mask, inputs, lengths), lengths)
        return lists(*classify(rule, lengths, torch.int32))


def block_mask_program(spec: AttentionSpec) -> Program:
    """Inputs: the family's tensors, then the length carriers; outputs: the block lists."""
    arguments = mask_arguments(spec.mask, _sizes(spec.mask))
    # Not named dimensions: lists of a single block would have to be ruled out, although they come out right.
    dims = {axis: Dim.DYNAMIC(max=_BATCH if axis == "B" else _LENGTH) for axis in "BNTQK"}
    return Program(
        module=_BlockLists(spec.mask),
        args=arguments.tensors,
        dynamic_shapes=tuple({i: dims[axis] for i, axis in enumerate(axes)} for axes in arguments.axes),
        inputs=arguments.names,
        outputs=MASK_TENSORS,
    )
