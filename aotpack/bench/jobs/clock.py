"""Seconds of calls: device events on CUDA, wall time on the CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

__all__ = ["Chain", "host_seconds", "synchronize"]

_LASTING: Final = 0.1
_MOST: Final = 50


def synchronize(device: str) -> None:
    """Waits for what a CUDA device still has to do."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class Chain:
    """Calls that are measured one after the other; each gets what the one before it returned.

    They are run once when the chain is made, so that what a first run prepares is not measured.

    Args:
        links: the calls; the first gets None.
        device: that they work on.
    """

    def __init__(self, links: Sequence[Callable[[Any], Any]], device: str) -> None:
        self._links, self._device, self._count = tuple(links), device, 0
        self._run()
        synchronize(device)

    def seconds(self) -> list[float]:
        """Mean seconds of each link, after a run that is not measured.

        The chain is run so often that all together lasts a tenth of a second or so. On CUDA the host does
        not wait in between: a link takes what the device takes for it, or the host where that is slower.
        """
        self._run()
        synchronize(self._device)
        if not self._count:
            # Not when the chain is made: rivals may be at work then.
            start = time.perf_counter()
            self._run()
            synchronize(self._device)
            self._count = max(1, min(_MOST, round(_LASTING / (time.perf_counter() - start))))
        return self._on_cuda() if torch.device(self._device).type == "cuda" else self._on_cpu()

    def _run(self) -> None:
        value: Any = None
        for link in self._links:
            value = link(value)

    def _on_cuda(self) -> list[float]:
        places = range(len(self._links))
        with torch.cuda.device(self._device):
            events = [
                [torch.cuda.Event(enable_timing=True) for _ in range(len(self._links) + 1)]
                for _ in range(self._count)
            ]
            for marks in events:
                value: Any = None
                marks[0].record()
                for mark, link in zip(marks[1:], self._links, strict=True):
                    value = link(value)
                    mark.record()
            torch.cuda.synchronize()
        return [
            sum(marks[i].elapsed_time(marks[i + 1]) for marks in events) / 1e3 / self._count for i in places
        ]

    def _on_cpu(self) -> list[float]:
        taken = [0.0] * len(self._links)
        for _ in range(self._count):
            value: Any = None
            for i, link in enumerate(self._links):
                start = time.perf_counter()
                value = link(value)
                taken[i] += time.perf_counter() - start
        return [each / self._count for each in taken]


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
