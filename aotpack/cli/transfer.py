"""Bytes that come and go, on stderr: one live line, on a terminal only."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Final, Self

from aotpack.cli.console import Console
from aotpack.cli.text import size

__all__ = ["TransferProgress"]

_TICK: Final = 0.1
_CLEAR: Final = "\r\x1b[2K"
_WIDTH: Final = 24


class TransferProgress:
    """Called with the number of bytes of each piece; a context manager that takes the live line away.

    Attributes:
        done: bytes so far.
        total: bytes in the end; 0 where that is not known.
    """

    def __init__(self, console: Console, total: int = 0) -> None:
        self.done = 0
        self.total = total
        self._live = console.live
        self._drawn = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawn:
            self._draw("")

    def __call__(self, count: int) -> None:
        self.done += count
        now = time.monotonic()
        if self._live and now - self._drawn > _TICK:
            self._drawn = now
            self._draw(self._line())

    def _line(self) -> str:
        if not self.total:
            return size(self.done)
        share = min(self.done / self.total, 1.0)
        bar = "#" * round(share * _WIDTH)
        return f"[{bar:<{_WIDTH}}] {share:4.0%}  {size(self.done)} of {size(self.total)}"

    def _draw(self, text: str) -> None:
        try:
            sys.stderr.write(_CLEAR + text)
            sys.stderr.flush()
        except OSError:
            self._live = False
