"""A step's parts once everything is loaded and compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from aotpack.bench.case import Case
from aotpack.bench.jobs.clock import Chain, host_seconds
from aotpack.bench.jobs.torch_loader import TorchPrograms
from aotpack.bench.jobs.ways import CompiledFlex, way
from aotpack.bench.jobs.workload import draw, read_spec

__all__ = ["ceiling", "loader_overhead", "mask", "overhead", "step"]

_Measured = tuple[dict[str, Any], Callable[[], dict[str, float]]]
_CEILING: Final = 8192
_CALLS: Final = 200


def step(case: Case, who: str) -> _Measured:
    """Seconds of forward and of backward through autograd; says once how much the mask shows."""
    work, attend = draw(case), way(who, case)
    made = attend.block_mask(**work.mask)
    chain = Chain((lambda _: attend(work.q, work.k, work.v, made), work.gradients), case.device)
    info = work.visible() if who == "aotpack" else {}

    def measure() -> dict[str, float]:
        forward, backward = chain.seconds()
        return {"forward": forward, "backward": backward}

    return info, measure


def ceiling(case: Case) -> _Measured:
    """FLOP/s of cuDNN's causal attention of 8192 tokens, forward and backward, with the spec's heads."""
    spec, length = read_spec(case), _CEILING
    dtype = getattr(torch, spec.dtype)
    shape = (1, spec.heads, length, spec.head_dim)
    q, k, v, grad = (torch.randn(shape, device=case.device, dtype=dtype) for _ in range(4))
    inputs = tuple(x.requires_grad_() for x in (q, k, v))

    def forward(_: Any) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    chain = Chain((forward, lambda out: torch.autograd.grad(out, inputs, grad)), case.device)
    cells = spec.heads * length * (length + 1) // 2

    def measure() -> dict[str, float]:
        taken = chain.seconds()
        return {
            "forward": 4 * spec.head_dim * cells / taken[0],
            "backward": 10 * spec.head_dim * cells / taken[1],
        }

    return {"rate": "FLOP/s"}, measure


def mask(case: Case, who: str) -> _Measured:
    """Seconds of a step's block mask."""
    work = draw(case, gradients=False)
    maker = (
        way("aotpack", case)
        if who == "aotpack"
        else CompiledFlex(work.spec, compiled_mask=who == "mask-compiled")
    )
    chain = Chain((lambda _: maker.block_mask(**work.mask),), case.device)
    return {}, lambda: {"mask": chain.seconds()[0]}


def overhead(case: Case, who: str) -> _Measured:
    """Microseconds of the host until a call returns: block mask, forward, and backward through autograd."""
    torch.set_num_threads(1)
    work, attend = draw(case), way(who, case)
    made = attend.block_mask(**work.mask)

    def measure() -> dict[str, float]:
        outs: list[Tensor] = []
        found = {
            "mask": lambda _: attend.block_mask(**work.mask),
            "forward": lambda _: outs.append(attend(work.q, work.k, work.v, made)),
            "backward": lambda number: work.gradients(outs[number]),
        }
        return {part: 1e6 * host_seconds(call, case.device, _CALLS) for part, call in found.items()}

    measure()
    return {}, measure


def loader_overhead(case: Case) -> _Measured:
    """The same of the bare programs in torch's own loader, without autograd."""
    torch.set_num_threads(1)
    work = draw(case, gradients=False)
    programs = TorchPrograms(case, work.spec, tempfile.mkdtemp())
    programs.load(1)
    inputs = programs.step_inputs(work, programs.block_mask(work))
    saved = {**inputs, **programs.forward(inputs)}

    def measure() -> dict[str, float]:
        found: dict[str, Callable[[int], object]] = {
            "mask": lambda _: programs.block_mask(work),
            "forward": lambda _: programs.forward(inputs),
            "backward": lambda _: programs.backward(saved),
        }
        return {part: 1e6 * host_seconds(call, case.device, _CALLS) for part, call in found.items()}

    measure()
    return {}, measure
