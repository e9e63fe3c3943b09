"""From a process that has imported torch and has its inputs to the end of the first step."""

from __future__ import annotations

import tempfile
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
    "torch_loader",
]


def aotpack(
    package: str, spec: str, context: int, anchors: int, device: str, backward: bool
) -> dict[str, Any]:
    """Import of aotpack's runtime, load, block mask, forward and, if asked, backward."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, gradients=backward, device=device)

    def first_step() -> None:
        from aotpack.runtime import load

        attend = load(package, device).attention(spec)
        mask = attend.block_mask(anchors=work.anchors, keep=work.keep, context_len=context)
        out = attend(work.q, work.k, work.v, mask)
        if backward:
            work.gradients_of_loss(out)

    return _timed(first_step, device)


def torch_loader(package: str, spec: str, context: int, anchors: int, device: str) -> dict[str, Any]:
    """torch's own loader of the same libraries: load, block mask, bare forward and backward, no autograd.

    One forward and one backward, not one for each specialisation; the files it reads are made before.
    """
    from aotpack.bench.jobs.torch_loader import TorchPrograms

    work = draw(read_spec(package, spec), context=context, anchors=anchors, gradients=False, device=device)
    with tempfile.TemporaryDirectory() as folder:
        programs = TorchPrograms(package, work.spec, Path(folder), device=device)
        lse_grad = torch.zeros(work.q.shape[:3], device=device)

        def first_step() -> None:
            programs.load(1)
            tensors = {"q": work.q, "k": work.k, "v": work.v, "grad.out": work.grad, "grad.lse": lse_grad}
            programs.step({**programs.block_mask(work), **tensors})

        return _timed(first_step, device)


def compiled_flex(
    package: str,
    spec: str,
    context: int,
    anchors: int,
    device: str,
    backward: bool,
    artifacts: str,
    keep_artifacts: bool = False,
) -> dict[str, Any]:
    """create_block_mask, torch.compile(flex_attention) and, if asked, backward, which the CPU does not have.

    Args:
        artifacts: file of ``torch.compiler.save_cache_artifacts``; loaded first where it exists.
        keep_artifacts: write it, after the clock has stopped.
    """
    work = draw(read_spec(package, spec), context=context, anchors=anchors, gradients=backward, device=device)

    def first_step() -> None:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if Path(artifacts).exists():
            torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
        size, anchor, keep = work.spec.mask.block_size or 1, work.anchors, work.keep

        def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            block = q // size
            seen = (kv < context) & (kv < anchor[b, block])
            own = (kv >= context) & ((kv - context) // size == block)
            return (seen | own) & keep[b, block]

        mask = create_block_mask(rule, 1, None, work.q.shape[2], work.k.shape[2], device=device)
        out = torch.compile(flex_attention)(
            work.q, work.k, work.v, block_mask=mask, scale=work.spec.scale, enable_gqa=True
        )
        if backward:
            work.gradients_of_loss(out)

    timed = _timed(first_step, device)
    if keep_artifacts:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(artifacts).write_bytes(saved[0])
    return timed


def compiled_dense(package: str, spec: str, context: int, anchors: int, device: str) -> dict[str, Any]:
    """torch.compile of dense attention with its mask, forward and backward."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, device=device)

    def first_step() -> None:
        work.gradients_of_loss(
            torch.compile(dense_attention)(work.q, work.k, work.v, work.visible(), work.spec.scale)
        )

    return _timed(first_step, device)


def eager_dense(package: str, spec: str, context: int, anchors: int, device: str) -> dict[str, Any]:
    """scaled_dot_product_attention, which compiles nothing."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, device=device)
    return _timed(lambda: work.gradients_of_loss(sdpa(work, work.visible())), device)


def make_precompiled(
    package: str, spec: str, context: int, anchors: int, device: str, folder: str
) -> dict[str, Any]:
    """torch.compiler.precompile of dense attention with its backward, into two files."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, device=device)
    step = _step(work)
    arguments = (work.q, work.k, work.v, work.visible(), work.grad)
    found: dict[str, tuple[str, bytes]] = {}

    def make() -> None:
        found["artifact"] = torch.compiler.precompile(step, *arguments)

    timed = _timed(make, device)
    source, cache = found["artifact"]
    (Path(folder) / "code.py").write_text(source)
    (Path(folder) / "cache").write_bytes(cache)
    return timed


def precompiled_dense(
    package: str, spec: str, context: int, anchors: int, device: str, folder: str
) -> dict[str, Any]:
    """torch.compiler.precompile.load and the first step."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors, device=device)

    def first_step() -> None:
        source, cache = (Path(folder) / "code.py").read_text(), (Path(folder) / "cache").read_bytes()
        step = torch.compiler.precompile.load(source, cache)
        step(work.q, work.k, work.v, work.visible(), work.grad)

    return _timed(first_step, device)


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


def _timed(first_step: Callable[[], object], device: str) -> dict[str, Any]:
    cuda = torch.device(device).type == "cuda"
    # The loss's kernels are torch's own, and CUDA loads each when it is first run.
    x = torch.ones(256, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.autograd.grad((x * x.detach()).sum(), x)
    if cuda:
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    first_step()
    if cuda:
        torch.cuda.synchronize(device)
    return {"seconds": time.perf_counter() - start}
