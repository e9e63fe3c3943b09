"""Two threads that do twice the work of one, on the same libraries in two loaders."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from aotpack.bench.case import Case
from aotpack.bench.jobs.torch_loader import TorchPrograms
from aotpack.bench.jobs.ways import Way, way
from aotpack.bench.jobs.workload import Workload, draw

__all__ = ["two_threads"]

_THREADS: Final = 2


def two_threads(case: Case, repeat: int, lasting: float) -> dict[str, Any]:
    """For each loader, seconds of one thread and of two that do the same work each, in turn.

    Args:
        case: what one call works on.
        repeat: measurements of each.
        lasting: seconds that one thread should work for.
    """
    torch.set_num_threads(1)
    attend, work = way("aotpack", case), draw(case)
    with tempfile.TemporaryDirectory() as folder:
        steps = {
            "aotpack": _ours(attend, work),
            "torch": _theirs(case, work, Path(folder)),
            "machine": _matmul(),
        }
        calls = {who: max(1, round(lasting / _once(step))) for who, step in steps.items()}
        found: dict[str, list[list[float]]] = {who: [] for who in steps}
        for _ in range(repeat):
            for who, step in steps.items():
                found[who].append([_parallel(step, calls[who], 1), _parallel(step, calls[who], _THREADS)])
    return {"calls": calls["aotpack"], **found}


def _once(step: Callable[[], object]) -> float:
    step()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _matmul() -> Callable[[], object]:
    """Work that holds no lock and needs little memory: what the machine's second processor is worth now."""
    a = torch.ones(512, 512)
    return lambda: torch.mm(a, a)


def _ours(attend: Way, work: Workload) -> Callable[[], object]:
    mask = attend.block_mask(**work.mask)
    return lambda: work.gradients(attend(work.q, work.k, work.v, mask))


def _theirs(case: Case, work: Workload, folder: Path) -> Callable[[], object]:
    """The bare programs, without autograd: what torch's loader costs at least."""
    programs = TorchPrograms(case, work.spec, folder)
    programs.load(_THREADS)
    inputs = programs.step_inputs(work, programs.block_mask(work))
    return lambda: programs.step(inputs)


def _parallel(step: Callable[[], object], calls: int, threads: int) -> float:
    """Seconds from a common start to the end of the last thread."""
    barrier = threading.Barrier(threads + 1)
    failures: list[BaseException] = []

    def thread() -> None:
        try:
            torch.set_num_threads(1)
            step()
            barrier.wait()
            for _ in range(calls):
                step()
        except BaseException as error:
            failures.append(error)
            barrier.abort()
            raise

    workers = [threading.Thread(target=thread) for _ in range(threads)]
    for worker in workers:
        worker.start()
    barrier.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]
    return time.perf_counter() - start
