"""Seconds of calls: device events on CUDA, wall time on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = ["chain_seconds", "host_seconds", "lasting", "synchronize"]

_LASTING: Final = 0.1
_MOST: Final = 50


def synchronize(device: str) -> None:
    """Waits for what a CUDA device still has to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def lasting(chain: Sequence[Callable[[Any], Any]], device: str) -> int:
    """How many times a chain is run for one measurement, so that it lasts a tenth of a second or so.

    The chain is run twice: what a first run prepares is not counted.
    """
    _run(chain)
    synchronize(device)
    start = time.perf_counter()
    _run(chain)
    synchronize(device)
    return max(1, min(_MOST, round(_LASTING / (time.perf_counter() - start))))


def chain_seconds(chain: Sequence[Callable[[Any], Any]], device: str, count: int) -> list[float]:
    """Mean seconds of each link of a chain of calls; each gets what the one before it returned.

    The chain is run once before it is measured ``count`` times. On CUDA the host does not wait in between, so
    a link takes what the device takes for it, or the host where the host is slower.
    """
    _run(chain)
    if torch.device(device).type != "cuda":
        return _on_cpu(chain, count)
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(chain) + 1)] for _ in range(count)]
        for marks in events:
            value: Any = None
            marks[0].record()
            for mark, link in zip(marks[1:], chain, strict=True):
                value = link(value)
                mark.record()
        torch.cuda.synchronize()
    links = range(len(chain))
    return [sum(marks[i].elapsed_time(marks[i + 1]) for marks in events) / 1e3 / count for i in links]


def host_seconds(call: Callable[[int], object], device: str, count: int) -> float:
    """Mean seconds until each of ``count`` calls returns; a device may still work then.

    The call gets its number.
    """
    synchronize(device)
    start = time.perf_counter()
    for number in range(count):
        call(number)
    taken = time.perf_counter() - start
    synchronize(device)
    return taken / count


def _on_cpu(chain: Sequence[Callable[[Any], Any]], count: int) -> list[float]:
    taken = [0.0] * len(chain)
    for _ in range(count):
        value: Any = None
        for i, link in enumerate(chain):
            start = time.perf_counter()
            value = link(value)
            taken[i] += time.perf_counter() - start
    return [each / count for each in taken]


def _run(chain: Sequence[Callable[[Any], Any]]) -> None:
    value: Any = None
    for link in chain:
        value = link(value)
