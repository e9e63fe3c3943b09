"""The stages of a build on stderr: a live line on a terminal, else one line a stage."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final, Self

from aotpack.build import Stage
from aotpack.cli.console import Console
from aotpack.cli.text import duration

__all__ = ["BuildProgress"]

_TICK: Final = 0.2
_CLEAR: Final = "\r\x1b[2K"


class BuildProgress:
    """Called with each stage as it begins and ends; a context manager that takes the live line away."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._running: dict[str, float] = {}
        self._ticker = threading.Thread(target=self._tick, daemon=True) if console.live else None

    def __enter__(self) -> Self:
        if self._ticker is not None:
            self._ticker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._ticker is not None:
            self._ticker.join()
            self._draw("")

    def __call__(self, stage: Stage) -> None:
        label = "  ".join(filter(None, (stage.target, stage.spec, stage.name)))
        with self._lock:
            if stage.seconds is None:
                self._running[label] = time.monotonic()
                return
            self._running.pop(label, None)
            if self._ticker is not None:
                self._draw("")
            self._console.say(f"{label}  {duration(stage.seconds)}")

    def _tick(self) -> None:
        while not self._done.wait(_TICK):
            with self._lock:
                if self._running:
                    label, since = next(iter(self._running.items()))
                    others = f" and {len(self._running) - 1} more" if len(self._running) > 1 else ""
                    self._draw(f"{label}  {time.monotonic() - since:.0f} s{others} ...")

    def _draw(self, text: str) -> None:
        try:
            sys.stderr.write(_CLEAR + text)
            sys.stderr.flush()
        except OSError:
            self._done.set()
