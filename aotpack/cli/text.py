"""Tables, sizes and times for people."""

from __future__ import annotations

from collections.abc import Sequence

import click

__all__ = ["columns", "duration", "fields", "size"]


def columns(rows: Sequence[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Rows of cells in aligned columns; cells may hold colours."""
    lines = [header, *rows] if header else list(rows)
    widths = [max(_width(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
    padded = (
        [cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    return "\n".join("  ".join(line).rstrip() for line in padded)


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """``name  value`` lines."""
    return columns([list(pair) for pair in pairs])


def size(count: int) -> str:
    """Bytes, for example ``1.5 MB``."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.2f} {unit}"


def duration(seconds: float) -> str:
    """Seconds, for example ``12.3 s`` or ``4.1 ms``."""
    if seconds < 0.001:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"


def _width(cell: str) -> int:
    return len(click.unstyle(cell))
