"""The three compiled programs of one variant on one device."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from aotpack.errors import HostError, InputError
from aotpack.masks import Lengths
from aotpack.package import Program, Variant
from aotpack.runtime.abi import Library
from aotpack.runtime.chunks import Chunked
from aotpack.runtime.cuda import current_stream, on_device
from aotpack.runtime.log import debugging, log
from aotpack.runtime.shapes import Sizes, fits
from aotpack.runtime.stats import Tally
from aotpack.store import kernel_folder, library_path

__all__ = ["CompiledPrograms", "Kind"]

_BLOCK: Final = 128
_REMEMBERED: Final = 4096
_ATTENTION_OUTPUTS: Final = ("out", "lse")
# Inputs of forward that are inputs of the block mask: the rule's own tensors, where forward evaluates it.
_PASSED: Final = "input."
_GRADIENTS: Final = ("grad.q", "grad.k", "grad.v")
_SCORE: Final = "score."
# What a program on chunks of rows takes of a mask: what says which cells of its rows are visible.
_OF_ROWS: Final = (
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "tiles",
    "tile_ids",
)


class CompiledPrograms:
    """Loads a variant's libraries at once; every call may come from any thread.

    On a CUDA device ``warm_up`` comes first.

    Attributes:
        kinds: attention's specialisations, the tightest first.
        name: of the attention that calls these programs, for the log.
        target: that the variant was built for.
        folder: of the store, with the libraries.
        block_masks: masks that were made.
        score: names of the score's tensors, in order; those with a gradient come first.
        trained: how many of them have one.

    Args:
        variant: chosen for this machine.
        folder: where the store unpacked and verified it.
        device: ``cpu`` or one CUDA device.
    """

    def __init__(self, variant: Variant, folder: Path, device: torch.device) -> None:
        self.name, self.target, self.folder = "", variant.target, folder
        self.block_masks = Tally()
        mask = _one(variant, "block_mask", "general")
        self._block_mask = _open(mask, folder, device)
        self._mask_bounds = mask.bounds
        kinds = [p.specialisation for p in variant.programs if p.name == "forward"] or ["general"]
        self.kinds = [
            Kind(mask, _one(variant, "forward", kind), _one(variant, "backward", kind), folder, device)
            for kind in kinds
        ]
        self._passed = self.kinds[0].passed
        self.score = self.kinds[0].score
        self.trained = self.kinds[0].trained
        # By batch, query and key length, on which the size of every tensor depends.
        self._chosen: dict[tuple[int, int, int], Kind] = {}
        self._index = None if device.type == "cpu" else device.index or 0

    def counted_for(self, name: str) -> Self:
        """The same programs with counts of their own, for the attention of that name."""
        other = copy.copy(self)
        other.name, other.block_masks, other._chosen = name, Tally(), {}
        other.kinds = [kind.counted() for kind in self.kinds]
        return other

    def block_mask(self, tensors: Sequence[Tensor], lengths: Lengths) -> list[Tensor]:
        """The tensors of forward's mask from the rule's inputs and the length carriers."""
        blocks = lengths.batch * -(-lengths.query // _BLOCK) * -(-lengths.key // _BLOCK)
        sizes = Sizes(lengths.batch, lengths.query, lengths.key, blocks)
        if not fits(self._mask_bounds, sizes):
            raise _too_large([self._mask_bounds], sizes)
        self.block_masks.add()
        if debugging():
            self._say("block_mask", "general", self._block_mask, sizes)
        found = self._run(self._block_mask, tensors)
        return [*found, *(tensors[place] for place in self._passed)]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], score: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """out [B,H,Q,Dv] and lse [B,H,Q]."""
        kind = self._kind(q, k, v, mask, score)
        kind.forwards.add()
        if debugging():
            self._say("forward", kind.name, kind.forward, tuple(q.shape))
        if kind.chunked is not None:
            return kind.chunked.run_forward(q, k, v, mask, score)
        out, lse = self._run(kind.forward, [q, k, v, *mask, *score])
        return out, lse

    def warm_up(
        self, kind: Kind, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], score: Sequence[Tensor] = ()
    ) -> None:
        """Runs forward and backward of one specialisation, whose bounds the caller has met."""
        if kind.chunked is not None:
            out, lse = kind.chunked.run_forward(q, k, v, mask, score)
            self.backward(out, lse, q, k, v, out, lse, mask, score)
            return
        out, lse = self._run(kind.forward, [q, k, v, *mask, *score])
        known = [q, k, v, *mask, *score, out, lse, out, lse]
        self._run(kind.backward, [known[place] for place in kind.backward_order])

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: list[Tensor],
        score: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """dq, dk and dv, shaped as q, k and v, and the gradients of the score's trained tensors."""
        kind = self._kind(q, k, v, mask, score)
        kind.backwards.add()
        if debugging():
            self._say("backward", kind.name, kind.backward, tuple(q.shape))
        if kind.chunked is not None:
            by_row = {"q": q, "out": out, "lse": lse, "grad.out": grad_out, "grad.lse": grad_lse}
            return kind.chunked.run_backward(by_row, k, v, mask, score, self.trained)
        known = [q, k, v, *mask, *score, out, lse, grad_out, grad_lse]
        return self._run(kind.backward, [known[place] for place in kind.backward_order])

    def _say(self, program: str, kind: str, library: Library, sizes: object) -> None:
        log.debug("%s of %r: %s, %s, %s, %s", program, self.name, self.target, kind, library.path, sizes)

    def _run(self, library: Library, tensors: Sequence[Tensor]) -> list[Tensor]:
        if self._index is None:
            return library(tensors)
        with on_device(self._index):
            return library(tensors, current_stream(self._index))

    def _kind(self, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], score: Sequence[Tensor]) -> Kind:
        shape = (q.shape[0], q.shape[2], k.shape[2])
        kind = self._chosen.get(shape)
        if kind is None:
            if len(self._chosen) >= _REMEMBERED:
                self._chosen.clear()
            kind = self._chosen[shape] = self._choose(q, k, v, [*mask, *score])
        return kind

    def _choose(self, q: Tensor, k: Tensor, v: Tensor, others: list[Tensor]) -> Kind:
        if not self.kinds[0].bounds:
            return self.kinds[0]
        out = q.numel() // q.shape[3] * v.shape[3]
        elements = max(out, *(tensor.numel() for tensor in (q, k, v, *others)))
        sizes = Sizes(q.shape[0], q.shape[2], k.shape[2], elements)
        for kind in self.kinds:
            if fits(kind.bounds, sizes):
                return kind
        raise _too_large([kind.bounds for kind in self.kinds], sizes)


class Kind:
    """Attention in one specialisation.

    Attributes:
        name: of the specialisation.
        bounds: of the shapes it takes.
        passed: which of the block mask's inputs forward takes too, as places.
        score: names of the score's tensors.
        trained: how many of them get a gradient, the first ones.
        backward_order: what backward takes, as places in
            [q, k, v, *mask, *score, out, lse, grad.out, grad.lse].
        chunked: the programs where they are called for chunks of rows, else None.
        forwards: calls of forward.
        backwards: calls of backward.
    """

    def __init__(
        self, mask: Program, forward: Program, backward: Program, folder: Path, device: torch.device
    ) -> None:
        passed, score = (
            [name for name in forward.inputs if name.startswith(prefix)] for prefix in (_PASSED, _SCORE)
        )
        _check_convention(mask, forward, backward, passed, score)
        self.name, self.bounds = forward.specialisation, forward.bounds
        self.forwards, self.backwards = Tally(), Tally()
        self.passed = [mask.inputs.index(name.removeprefix(_PASSED)) for name in passed]
        self.score = tuple(name.removeprefix(_SCORE) for name in score)
        self.trained = len(backward.outputs) - len(_GRADIENTS)
        known = (*forward.inputs, *_ATTENTION_OUTPUTS, *(f"grad.{name}" for name in _ATTENTION_OUTPUTS))
        self.backward_order = [known.index(name) for name in backward.inputs]
        self.forward = _open(forward, folder, device)
        self.backward = _open(backward, folder, device)
        self.chunked = None
        if "rows" in forward.bounds:
            self.chunked = Chunked(
                forward=self.forward,
                backward=self.backward,
                forward_inputs=forward.inputs,
                backward_inputs=backward.inputs,
                mask=[f"mask.{name}" for name in mask.outputs],
                score=score,
                rows=forward.bounds["rows"],
            )

    def counted(self) -> Self:
        """The same specialisation with counts of its own."""
        other = copy.copy(self)
        other.forwards, other.backwards = Tally(), Tally()
        return other


def _check_convention(
    mask: Program, forward: Program, backward: Program, passed: list[str], score: list[str]
) -> None:
    chunked = "rows" in forward.bounds
    of_mask = [f"mask.{name}" for name in mask.outputs if not chunked or name in _OF_ROWS]
    rows = ["rows"] if chunked else []
    gradients = tuple(f"grad.{name}" for name in score)
    agreed = (
        forward.inputs == ("q", "k", "v", *of_mask, *rows, *passed, *score)
        and {name.removeprefix(_PASSED) for name in passed} <= set(mask.inputs)
        and forward.outputs == _ATTENTION_OUTPUTS
        and backward.outputs[:3] == _GRADIENTS
        and backward.outputs[3:] == gradients[: len(backward.outputs) - 3]
        and backward.bounds == forward.bounds
        and set(backward.inputs) <= {*forward.inputs, "out", "lse", "grad.out", "grad.lse"}
    )
    if not agreed:
        raise HostError(
            "the programs of this package do not fit each other's calling convention",
            expected="the names that the manifest's calling convention defines",
            found=f"forward {forward.inputs} -> {forward.outputs}, backward {backward.inputs}",
            remedy="build the package again with this release of aotpack",
        )


def _one(variant: Variant, name: str, specialisation: str) -> Program:
    program = variant.program(name, specialisation)
    if program is None:
        raise HostError(
            f"the variant for {variant.target} has no {specialisation} {name} program",
            expected="block_mask, forward and backward",
            found=", ".join(f"{p.specialisation} {p.name}" for p in variant.programs),
            remedy="build the package again",
        )
    return program


def _open(program: Program, folder: Path, device: torch.device) -> Library:
    kernels = kernel_folder(folder, program) if program.kernels else None
    return Library(
        library_path(folder, program),
        str(device),
        kernels=kernels,
        inputs=len(program.inputs),
        outputs=len(program.outputs),
    )


def _too_large(bounds: Sequence[Mapping[str, int]], sizes: Sizes) -> InputError:
    return InputError(
        "no program of this package was compiled for these sizes",
        expected=" or ".join(", ".join(f"{n} {v}" for n, v in each.items()) for each in bounds),
        found=sizes,
        remedy="split the batch, or build the package for these lengths",
    )
