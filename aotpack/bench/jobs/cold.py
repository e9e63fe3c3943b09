"""From a process that has imported torch and has its inputs to the end of the first step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotpack.bench.jobs.workload import Workload, draw, read_spec, sdpa

__all__ = [
    "aotpack",
    "compiled_dense",
    "compiled_flex",
    "eager_dense",
    "make_precompiled",
    "precompiled_dense",
]


def aotpack(package: str, spec: str, context: int, anchors: int, backward: bool) -> dict[str, Any]:
    """Import of aotpack's runtime, load, block mask, forward and, if asked, backward."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, gradients=backward)

    def first_step() -> None:
        from aotpack.runtime import load

        attend = load(package).attention(spec)
        mask = attend.block_mask(anchors=work.anchors, keep=work.keep, context_len=context)
        out = attend(work.q, work.k, work.v, mask)
        if backward:
            work.gradients_of_loss(out)

    return _timed(first_step)


def compiled_flex(package: str, spec: str, context: int, anchors: int) -> dict[str, Any]:
    """create_block_mask and torch.compile(flex_attention), forward only: torch has no backward on the CPU."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, gradients=False)

    def first_step() -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        size, anchor, keep = work.spec.mask.block_size or 1, work.anchors, work.keep

        def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            block = q // size
            seen = (kv < context) & (kv < anchor[b, block])
            own = (kv >= context) & ((kv - context) // size == block)
            return (seen | own) & keep[b, block]

        mask = create_block_mask(rule, 1, None, work.q.shape[2], work.k.shape[2], device="cpu")
        torch.compile(flex_attention)(
            work.q, work.k, work.v, block_mask=mask, scale=work.spec.scale, enable_gqa=True
        )

    return _timed(first_step)


def compiled_dense(package: str, spec: str, context: int, anchors: int) -> dict[str, Any]:
    """torch.compile of dense attention with its mask, forward and backward."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors)

    def first_step() -> None:
        work.gradients_of_loss(
            torch.compile(dense_attention)(work.q, work.k, work.v, work.visible(), work.spec.scale)
        )

    return _timed(first_step)


def eager_dense(package: str, spec: str, context: int, anchors: int) -> dict[str, Any]:
    """scaled_dot_product_attention, which compiles nothing."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors)
    return _timed(lambda: work.gradients_of_loss(sdpa(work, work.visible())))


def make_precompiled(package: str, spec: str, context: int, anchors: int, folder: str) -> dict[str, Any]:
    """torch.compiler.precompile of dense attention with its backward, into two files."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors)
    step = _step(work)
    arguments = (work.q, work.k, work.v, work.visible(), work.grad)
    found: dict[str, tuple[str, bytes]] = {}

    def make() -> None:
        found["artifact"] = torch.compiler.precompile(step, *arguments)

    timed = _timed(make)
    source, cache = found["artifact"]
    (Path(folder) / "code.py").write_text(source)
    (Path(folder) / "cache").write_bytes(cache)
    return timed


def precompiled_dense(package: str, spec: str, context: int, anchors: int, folder: str) -> dict[str, Any]:
    """torch.compiler.precompile.load and the first step."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors)

    def first_step() -> None:
        source, cache = (Path(folder) / "code.py").read_text(), (Path(folder) / "cache").read_bytes()
        step = torch.compiler.precompile.load(source, cache)
        step(work.q, work.k, work.v, work.visible(), work.grad)

    return _timed(first_step)


def _step(work: Workload) -> Callable[..., tuple[Tensor, ...]]:
    scale = work.spec.scale

    def step(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = dense_attention(q, k, v, visible, scale)
        return torch.autograd.grad((out * grad).sum(), (q, k, v))

    return step


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _timed(first_step: Callable[[], object]) -> dict[str, Any]:
    start = time.perf_counter()
    first_step()
    return {"seconds": time.perf_counter() - start}
