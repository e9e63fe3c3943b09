"""What a bench found: rows, each with its ratio over aotpack's own row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aotpack.bench.protocol import Timing

__all__ = ["Result", "Row", "against"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure.

    Attributes:
        what: who did what.
        value: median; None where it could not be measured, and ``what`` says why.
        unit: ``"s"``, ``"MB"`` (10**6 bytes) or ``"x"`` (a ratio of two times).
        ratio: value over aotpack's own row.
        spread: lowest and highest measurement.
    """

    what: str
    value: float | None
    unit: str
    ratio: float | None
    spread: tuple[float, float] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {"what": self.what, "value": self.value, "unit": self.unit, "ratio": self.ratio}


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """All rows of one bench.

    Attributes:
        name: of the bench.
        measured: what a row's value is, one sentence.
        rows: in the order they are printed.
        facts: what the figures depend on; no host names and no paths.
    """

    name: str
    measured: str
    rows: tuple[Row, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schema(self) -> str:
        """Of the JSON object."""
        return f"aotpack.bench.{self.name}/1"

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the schema."""
        return {
            "rows": [row.to_dict() for row in self.rows],
            "measured": self.measured,
            "facts": dict(self.facts),
            "spread": {row.what: list(row.spread) for row in self.rows if row.spread is not None},
        }


def against(own: str, timings: Mapping[str, Timing | str], unit: str = "s") -> list[Row]:
    """Rows of several timings, with ratios over the one that is named ``own``.

    A string instead of a timing says why there is none.
    """
    base = timings[own]
    rows = []
    for what, timing in timings.items():
        if isinstance(timing, str):
            rows.append(Row(what=f"{what}: {timing}", value=None, unit=unit, ratio=None))
            continue
        ratio = None if isinstance(base, str) or not base.median else round(timing.median / base.median, 3)
        spread = (_rounded(timing.low), _rounded(timing.high))
        rows.append(Row(what=what, value=_rounded(timing.median), unit=unit, ratio=ratio, spread=spread))
    return rows


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
