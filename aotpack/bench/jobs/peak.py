"""Memory that a step takes at its highest."""

from __future__ import annotations

import contextlib
import ctypes
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from aotpack.bench.case import Case
from aotpack.bench.jobs.ways import Way, way
from aotpack.bench.jobs.workload import Workload, draw

__all__ = ["memory"]


def memory(case: Case, who: str) -> dict[str, Any]:
    """Bytes that one step, mask included, takes on top of its inputs; it is not the process's first step.

    On CUDA the allocator's peak, after a step of the same lengths; on the CPU the process's own, after a
    small one.

    Raises:
        OSError: the system does not say what a process's memory was at its highest.
    """
    attend = way(who, case)
    if torch.device(case.device).type == "cuda":
        return {"bytes": _allocated(attend, draw(case))}
    # A compiled function is for one shape: it has to see that of the measurement before, too.
    first = case if who == "compiled-dense" else replace(case, context=64, anchors=4)
    _step(attend, draw(first))
    return {"bytes": _resident(attend, draw(case))}


def _allocated(attend: Way, work: Workload) -> int:
    device = work.q.device
    _step(attend, work)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    _step(attend, work)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _resident(attend: Way, work: Workload) -> int:
    # What malloc keeps of freed tensors would hide what the step takes.
    ctypes.CDLL(None).malloc_trim(0)
    # Forgets the highest value so far; see proc(5), clear_refs.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    _step(attend, work)
    return _status("VmHWM") - before


def _step(attend: Way, work: Workload) -> None:
    made = attend.block_mask(**work.mask)
    work.gradients(attend(work.q, work.k, work.v, made))


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024
