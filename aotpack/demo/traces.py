"""A count of what torch traced in this process: the figure that a trainer on a package keeps at zero."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any, Self

from torch.fx import Graph, Tracer

__all__ = ["TraceCounter"]


class TraceCounter:
    """Counts while it is entered, in all threads: FX traces and frames that dynamo traced.

    ``torch.fx.symbolic_trace``, ``make_fx`` and all that builds on them are FX traces.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traced = 0
        self._frames_before = 0
        self._original = Tracer.trace

    @property
    def count(self) -> int:
        """FX traces and dynamo frames up to now."""
        return self._traced + _dynamo_frames() - self._frames_before

    def __enter__(self) -> Self:
        original = self._original = Tracer.trace

        def trace(tracer: Tracer, *args: Any, **kwargs: Any) -> Graph:
            with self._lock:
                self._traced += 1
            return original(tracer, *args, **kwargs)

        Tracer.trace = trace  # type: ignore[method-assign, assignment]
        self._frames_before = _dynamo_frames()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        Tracer.trace = self._original  # type: ignore[method-assign]


def _dynamo_frames() -> int:
    """Frames that dynamo traced since the process began, recompilations too; 0 while it is not imported."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return sum(module.FRAME_COMPILE_COUNTER.values()) if module is not None else 0
