"""The programs of a CUDA variant: flex attention with the mask's rule inside, and its block lists."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from aotpack.build.blocks import (
    BLOCK,
    MASK_TENSORS,
    classify,
    lists,
    mask_arguments,
    mask_lengths,
)
from aotpack.build.programs import Program
from aotpack.build.specialisations import MAX_BATCH, MAX_LENGTH, Specialisation
from aotpack.masks import Family, Input, Lengths, family_of, inside
from aotpack.scores import Family as ScoreFamily
from aotpack.scores import family_of as family_of_score
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.spec.tensors import shape_of

__all__ = ["attention_program", "block_mask_program"]

_Axes = tuple[str | int, ...]
_PRECISION: Final = {"highest": "'ieee'", "high": "'tf32'"}
# Example sizes of axes that are a rule's own: none may equal another axis's.
_FREE: Final = 1021
_SCORE: Final = "score."


class _FlexAttention(torch.nn.Module):
    def __init__(self, spec: AttentionSpec, names: tuple[str, ...], options: Mapping[str, Any]) -> None:
        super().__init__()
        self.spec = spec
        self.names = names
        # Short queries would otherwise take the flex-decoding kernel, a second code path.
        self.options: Any = {**options, "FORCE_USE_FLEX_ATTENTION": True}
        if spec.matmul_precision is not None:
            # Of the spec, not of the building process: the text is Triton's, quotes included.
            self.options["FLOAT32_PRECISION"] = _PRECISION[spec.matmul_precision]

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = args[:3]
        tensors = dict(zip(self.names, args[3:], strict=True))
        score = {n.removeprefix(_SCORE): tensors.pop(n) for n in self.names if n.startswith(_SCORE)}
        blocks: Any = {name: tensors.pop(name) for name in MASK_TENSORS}
        lengths = Lengths(batch=blocks["kv_indices"].shape[0], query=q.shape[2], key=k.shape[2])
        rule = family_of(self.spec.mask).rule(self.spec.mask, tensors, lengths)
        mask = BlockMask(
            seq_lengths=(lengths.query, lengths.key),
            **blocks,
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=lambda b, h, q_index, kv_index: rule(b, q_index, kv_index),
        )
        return flex_attention(
            q,
            k,
            v,
            score_mod=self._score_mod(score),
            block_mask=mask,
            scale=self.spec.scale,
            enable_gqa=True,
            return_lse=True,
            kernel_options=self.options,
        )

    def _score_mod(self, tensors: Mapping[str, Tensor]) -> Callable[..., Tensor] | None:
        family = _score_family(self.spec)
        if family is None or family.rule is None:
            return None
        heads = self.spec.heads
        rule = family.rule(heads)
        # All cells would add to the gradient of one number in turn; each head has a copy of its own instead,
        # and expand's backward adds them (scalars.py says why there are two at least).
        scalars = {
            given.name: tensors[given.name].expand(max(2, heads))
            for given in family.trained
            if not given.dims
        }

        def modify(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            own = {name: tensor[h] for name, tensor in scalars.items()}
            return rule({**tensors, **own}, score, b, h, q, kv)

        return modify


def _score_family(spec: AttentionSpec) -> ScoreFamily | None:
    return None if spec.score is None else family_of_score(spec.score)


def attention_program(
    spec: AttentionSpec, specialisation: Specialisation, options: Mapping[str, Any]
) -> Program:
    """Inputs q, k, v, the block mask's outputs, the rule's other inputs and the score's tensors.

    Outputs out and log-sum-exp. Sinks are an input that nobody reads (``sinks.py``).

    Args:
        spec: what to compile.
        specialisation: the shapes it is compiled for.
        options: tile sizes, as ``flex_attention``'s ``kernel_options``.
    """
    family, dtype = family_of(spec.mask), getattr(torch, spec.dtype)
    score = _score_family(spec)
    passed = [given for given in family.inputs if not given.positions]
    tensors: dict[str, tuple[_Axes, torch.dtype]] = {
        "q": (("B", spec.heads, "Q", spec.head_dim), dtype),
        "k": (("B", spec.kv_heads, "K", spec.head_dim), dtype),
        "v": (("B", spec.kv_heads, "K", spec.value_dim), dtype),
        **{f"mask.{name}": (axes, torch.int32) for name, axes in _mask_outputs(family).items()},
        **{f"input.{given.name}": (given.dims, given.dtype) for given in passed},
        **{
            f"{_SCORE}{given.name}": (
                tuple(spec.heads if axis == "H" else axis for axis in given.dims),
                getattr(torch, given.dtype),
            )
            for given in (() if score is None else score.inputs)
        },
    }
    free = _free_axes(axes for axes, _ in tensors.values())
    sizes, dims = _sizes(spec.mask, specialisation, free), _dims(specialisation, free)
    shapes = [axes for axes, _ in tensors.values()]
    return Program(
        module=_FlexAttention(
            spec,
            tuple(
                name if name.startswith(_SCORE) else name.partition(".")[2] for name in tensors if "." in name
            ),
            options,
        ),
        # Empty, because nobody reads their values and most of them are large.
        args=tuple(torch.empty(shape_of(axes, sizes), dtype=t) for axes, t in tensors.values()),
        dynamic_shapes=tuple(
            {i: dims[axis] for i, axis in enumerate(axes) if isinstance(axis, str) and axis in dims}
            for axes in shapes
        ),
        inputs=tuple(tensors),
        outputs=("out", "lse"),
    )


class _BlockLists(torch.nn.Module):
    def __init__(self, mask: MaskSpec) -> None:
        super().__init__()
        self.mask = mask
        self.family = family_of(mask)

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        inputs, lengths = mask_lengths(self.family, self.mask, args)
        placed = [given for given in self.family.inputs if given.positions]
        positions = {given.name: self._bounded(given, inputs, lengths) for given in placed}
        rule = inside(self.family.rule(self.mask, {**inputs, **positions}, lengths), lengths)
        return (*lists(*classify(rule, lengths, torch.int32)), *positions.values())

    def _bounded(self, given: Input, inputs: Mapping[str, Tensor], lengths: Lengths) -> Tensor:
        # Values are not checked on a GPU, where that would wait; a wrong one must not read past an end.
        last = self.family.end_of(given, inputs, lengths) - int(given.gathered)
        return inputs[given.name].clamp(0, last).to(torch.int32)


def block_mask_program(spec: AttentionSpec, specialisation: Specialisation) -> Program:
    """Inputs: the family's tensors, then the length carriers; outputs: block lists and 32-bit positions."""
    free = _free_axes(given.dims for given in family_of(spec.mask).inputs)
    arguments = mask_arguments(spec.mask, _sizes(spec.mask, specialisation, free))
    # Not named dimensions: tracing notes whether each tensor is contiguous, and then the lists of a single
    # block would have to be ruled out, although they come out right.
    batch, length = Dim.DYNAMIC(max=MAX_BATCH), Dim.DYNAMIC(max=MAX_LENGTH)
    return Program(
        module=_BlockLists(spec.mask),
        args=arguments.tensors,
        dynamic_shapes=tuple(
            {i: batch if axis == "B" else length for i, axis in enumerate(axes) if isinstance(axis, str)}
            for axes in arguments.axes
        ),
        inputs=arguments.names,
        outputs=tuple(_mask_outputs(family_of(spec.mask))),
    )


def _mask_outputs(family: Family) -> dict[str, _Axes]:
    """The block-mask program's outputs with their axes, all int32."""
    batch = "B" if family.batched else 1
    row: _Axes = (batch, 1, "Qb")
    column: _Axes = (batch, 1, "Kb")
    axes = (row, (*row, "Kb")) * 2 + (column, (*column, "Qb")) * 2
    positions = {given.name: given.dims for given in family.inputs if given.positions}
    return {**dict(zip(MASK_TENSORS, axes, strict=True)), **positions}


def _sizes(mask: MaskSpec, specialisation: Specialisation, axes: Sequence[str]) -> dict[str, int]:
    """Example sizes of the axes. They are a usual step's, which is what reductions are tuned for.

    Where any length will do they are odd, lest tracing take a divisor for granted.
    """
    query, context = (8192, 4096) if specialisation.divisor == BLOCK else (8217, 4099)
    size = mask.draft_size
    if size > 1 and specialisation.divisor == 1:
        query = -(-query // size) * size
    sizes = {"B": 2, "Q": query, "K": query + context, **specialisation.fixed}
    blocks = {axis + "b": -(-sizes[axis] // BLOCK) for axis in "QK"}
    free = {axis: _FREE + i for i, axis in enumerate(axes)}
    return {**free, **sizes, **blocks, "N": -(-sizes["Q"] // size), "T": max(1, sizes["K"] - sizes["Q"])}


def _free_axes(shapes: Iterable[_Axes]) -> list[str]:
    """Axes of the rules' tensors that are neither attention's own nor a drafter's."""
    axes = (axis for shape in shapes for axis in shape if isinstance(axis, str))
    return [axis for axis in dict.fromkeys(axes) if axis not in ("B", "N", "T", "Q", "K", "Qb", "Kb")]


def _dims(specialisation: Specialisation, axes: Sequence[str]) -> dict[str, Any]:
    """The dynamic axes: one symbol for each, since each symbol is an argument of each kernel."""
    free: dict[str, Any] = {axis: Dim(axis, min=1, max=MAX_LENGTH) for axis in axes}
    if specialisation.fixed:
        return free
    dims: dict[str, Any] = {axis: Dim(axis, min=1, max=MAX_LENGTH) for axis in "NT"}
    for axis in "QK":
        blocks = Dim(axis + "b", min=1, max=MAX_LENGTH // BLOCK)
        whole = specialisation.divisor == BLOCK
        dims |= {axis + "b": blocks, axis: BLOCK * blocks if whole else Dim(axis, min=1, max=MAX_LENGTH)}
    return {"B": Dim("B", min=1, max=MAX_BATCH), **dims, **free}
