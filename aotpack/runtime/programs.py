"""The three compiled programs of one variant on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from aotpack.errors import HostError
from aotpack.package import Program, Variant
from aotpack.runtime.abi import Library
from aotpack.store import kernel_folder, library_path

__all__ = ["CompiledPrograms"]

_ATTENTION_OUTPUTS: Final = ("out", "lse")
_GRADIENTS: Final = ("grad.q", "grad.k", "grad.v")


class CompiledPrograms:
    """Loads a variant's libraries at once; every call may come from any thread.

    Args:
        variant: chosen for this machine.
        folder: where the store unpacked and verified it.
        device: ``cpu`` or one CUDA device.
    """

    def __init__(self, variant: Variant, folder: Path, device: torch.device) -> None:
        mask, forward, backward = (_one(variant, name) for name in ("block_mask", "forward", "backward"))
        self._check_convention(mask, forward, backward)
        self._block_mask, self._forward, self._backward = (
            _open(program, folder, device) for program in (mask, forward, backward)
        )
        # What backward takes, as places in [q, k, v, *mask, out, lse, grad.out, grad.lse].
        known = (*forward.inputs, *_ATTENTION_OUTPUTS, *(f"grad.{name}" for name in _ATTENTION_OUTPUTS))
        self._backward_order = [known.index(name) for name in backward.inputs]
        self._stream = _stream_of(device)

    def block_mask(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The block mask's tensors from the rule's inputs and the length carriers."""
        return self._block_mask(tensors, self._stream())

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor]) -> tuple[Tensor, Tensor]:
        """out [B,H,Q,Dv] and lse [B,H,Q]."""
        out, lse = self._forward([q, k, v, *mask], self._stream())
        return out, lse

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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk and dv, shaped as q, k and v."""
        known = [q, k, v, *mask, out, lse, grad_out, grad_lse]
        dq, dk, dv = self._backward([known[place] for place in self._backward_order], self._stream())
        return dq, dk, dv

    @staticmethod
    def _check_convention(mask: Program, forward: Program, backward: Program) -> None:
        fits = (
            forward.inputs == ("q", "k", "v", *(f"mask.{name}" for name in mask.outputs))
            and forward.outputs == _ATTENTION_OUTPUTS
            and backward.outputs == _GRADIENTS
            and set(backward.inputs) <= {*forward.inputs, "out", "lse", "grad.out", "grad.lse"}
        )
        if not fits:
            raise HostError(
                "the programs of this package do not fit each other's calling convention",
                expected="the names that the manifest's calling convention defines",
                found=f"forward {forward.inputs} -> {forward.outputs}, backward {backward.inputs}",
                remedy="build the package again with this release of aotpack",
            )


def _one(variant: Variant, name: str) -> Program:
    program = variant.program(name)
    if program is None:
        raise HostError(
            f"the variant for {variant.target} has no {name} program",
            expected="block_mask, forward and backward",
            found=", ".join(p.name for p in variant.programs),
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


def _stream_of(device: torch.device) -> Callable[[], int | None]:
    if device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.current_stream(device).cuda_stream
