"""From a process that has imported torch and has its inputs to the end of the first step."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotpack.bench.case import Case
from aotpack.bench.jobs.clock import synchronize
from aotpack.bench.jobs.ways import CompiledFlex, dense_attention, way
from aotpack.bench.jobs.workload import Workload, draw, read_spec

__all__ = [
    "aotpack",
    "compiled_dense",
    "compiled_flex",
    "eager_dense",
    "make_precompiled",
    "precompiled_dense",
    "torch_loader",
]


def aotpack(case: Case, backward: bool) -> dict[str, Any]:
    """Import of aotpack's runtime, load, block mask, forward and, if asked, backward."""
    return _first_step(case, lambda: way("aotpack", case), backward)


def compiled_flex(case: Case, backward: bool, artifacts: str, keep_artifacts: bool = False) -> dict[str, Any]:
    """create_block_mask, torch.compile(flex_attention) and, if asked, backward, which the CPU does not have.

    Args:
        case: what the step works on.
        backward: whether it is a training step.
        artifacts: file of ``torch.compiler.save_cache_artifacts``; loaded first where it exists.
        keep_artifacts: write it, after the clock has stopped.
    """
    return _with_artifacts(case, _flex, backward, artifacts, keep_artifacts)


def compiled_dense(case: Case, artifacts: str, keep_artifacts: bool = False) -> dict[str, Any]:
    """torch.compile of dense attention with its mask, forward and backward; the rest as above."""
    return _with_artifacts(case, lambda case: way("compiled-dense", case), True, artifacts, keep_artifacts)


def eager_dense(case: Case) -> dict[str, Any]:
    """scaled_dot_product_attention, which compiles nothing."""
    return _first_step(case, lambda: way("sdpa", case), True)


def torch_loader(case: Case) -> dict[str, Any]:
    """torch's own loader of the same libraries: load, block mask, bare forward and backward, no autograd.

    One forward and one backward, not one for each specialisation; the files it reads are made before.
    """
    from aotpack.bench.jobs.torch_loader import TorchPrograms

    work = draw(case, gradients=False)
    with tempfile.TemporaryDirectory() as folder:
        programs = TorchPrograms(case, work.spec, folder)

        def first_step() -> None:
            programs.load(1)
            programs.step(programs.step_inputs(work, programs.block_mask(work)))

        return _timed(first_step, case.device)


def make_precompiled(case: Case, folder: str) -> dict[str, Any]:
    """torch.compiler.precompile of dense attention with its backward, into two files."""
    work = draw(case)
    step = _step(work)
    visible = way("sdpa", case).block_mask(**work.mask)
    found: dict[str, tuple[str, bytes]] = {}

    def make() -> None:
        found["artifact"] = torch.compiler.precompile(step, work.q, work.k, work.v, visible, work.grad)

    timed = _timed(make, case.device)
    source, cache = found["artifact"]
    (Path(folder) / "code.py").write_text(source)
    (Path(folder) / "cache").write_bytes(cache)
    return {**timed, "bytes": len(source.encode()) + len(cache)}


def precompiled_dense(case: Case, folder: str) -> dict[str, Any]:
    """torch.compiler.precompile.load and the first step."""
    work = draw(case)

    def first_step() -> None:
        source, cache = (Path(folder) / "code.py").read_text(), (Path(folder) / "cache").read_bytes()
        step = torch.compiler.precompile.load(source, cache)
        step(work.q, work.k, work.v, way("sdpa", case).block_mask(**work.mask), work.grad)

    return _timed(first_step, case.device)


def _flex(case: Case) -> CompiledFlex:
    return CompiledFlex(read_spec(case))


def _step(work: Workload) -> Callable[..., tuple[Tensor, ...]]:
    scale = work.spec.scale

    def step(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        out = dense_attention(q, k, v, visible, scale)
        return torch.autograd.grad((out * grad).sum(), (q, k, v))

    return step


def _with_artifacts(
    case: Case, make: Callable[[Case], Any], backward: bool, artifacts: str, keep_artifacts: bool
) -> dict[str, Any]:
    def begin() -> Any:
        if Path(artifacts).exists():
            torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
        return make(case)

    timed = _first_step(case, begin, backward)
    if keep_artifacts:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(artifacts).write_bytes(saved[0])
    return timed


def _first_step(case: Case, begin: Callable[[], Any], backward: bool) -> dict[str, Any]:
    work = draw(case, gradients=backward)

    def first_step() -> None:
        attend = begin()
        out = attend(work.q, work.k, work.v, attend.block_mask(**work.mask))
        if backward:
            work.gradients_of_loss(out)

    return _timed(first_step, case.device)


def _timed(first_step: Callable[[], object], device: str) -> dict[str, Any]:
    # The loss's kernels are torch's own, and CUDA loads each when it is first run.
    x = torch.ones(256, 256, dtype=torch.bfloat16, device=device, requires_grad=True)
    torch.autograd.grad((x * x.detach()).sum(), x)
    synchronize(device)
    start = time.perf_counter()
    first_step()
    synchronize(device)
    return {"seconds": time.perf_counter() - start}
