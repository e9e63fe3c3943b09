"""A step's time and memory once everything is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotpack.bench.jobs.cold import dense_attention
from aotpack.bench.jobs.workload import Workload, draw, read_spec, sdpa
from aotpack.bench.protocol import in_turn, seconds
from aotpack.runtime import Attention, load

__all__ = ["compiled_dense", "memory", "side_by_side"]


def side_by_side(package: str, spec: str, context: int, anchors: int, repeat: int) -> dict[str, Any]:
    """Seconds of mask, forward and backward, ours and scaled_dot_product_attention's in turn."""
    attend = load(package).attention(spec)
    work = draw(attend.spec, context=context, anchors=anchors)
    parts: dict[str, list[list[float]]] = {"aotpack": [], "sdpa": []}
    steps = {
        "aotpack": lambda: parts["aotpack"].append(_parts(work, *_ours(attend, work))),
        "sdpa": lambda: parts["sdpa"].append(_parts(work, work.visible, lambda mask: sdpa(work, mask))),
    }
    in_turn(steps, warmups=1, repeat=repeat)
    return {who: found[1:] for who, found in parts.items()}


def memory(package: str, spec: str, context: int, anchors: int, who: str) -> dict[str, Any]:
    """Bytes that one step takes on top of its inputs, at its highest; the step is the process's second.

    Raises:
        OSError: the system does not say what a process's memory was at its highest.
    """
    attend = load(package).attention(spec)
    small = draw(attend.spec, context=64, anchors=4)
    _step(attend, small, who)
    work = draw(attend.spec, context=context, anchors=anchors)
    # What malloc keeps of freed tensors would hide what the step takes.
    ctypes.CDLL(None).malloc_trim(0)
    # Forgets the highest value so far; see proc(5), clear_refs.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    _step(attend, work, who)
    return {"bytes": _status("VmHWM") - before}


def compiled_dense(package: str, spec: str, context: int, anchors: int, repeat: int) -> dict[str, Any]:
    """Seconds of forward and backward of torch.compile'd dense attention, its compilation excluded."""
    work = draw(read_spec(package, spec), context=context, anchors=anchors)
    compiled = torch.compile(dense_attention)

    def step() -> None:
        work.gradients(compiled(work.q, work.k, work.v, work.visible(), work.spec.scale))

    step()
    return {"seconds": [seconds(step) for _ in range(repeat)]}


def _ours(attend: Attention, work: Workload) -> tuple[Callable[[], Any], Callable[[Any], Tensor]]:
    def mask() -> Any:
        return attend.block_mask(anchors=work.anchors, keep=work.keep, context_len=work.context_len)

    return mask, lambda made: attend(work.q, work.k, work.v, made)


def _parts(work: Workload, mask: Callable[[], Any], forward: Callable[[Any], Tensor]) -> list[float]:
    made: list[Any] = []
    times = [seconds(lambda: made.append(mask()))]
    times.append(seconds(lambda: made.append(forward(made[0]))))
    times.append(seconds(lambda: work.gradients(made[1])))
    return times


def _step(attend: Attention, work: Workload, who: str) -> None:
    mask, forward = _ours(attend, work) if who == "aotpack" else (work.visible, lambda made: sdpa(work, made))
    work.gradients(forward(mask()))


def _status(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/self/status has no {name}")
    return int(found[1]) * 1024
