"""What a bench found: rows, each with its ratio over aotpack's own row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aotpack.bench.protocol import Timing

__all__ = ["OWN", "Result", "Row", "against"]

OWN: Final = "aotpack"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure.

    Attributes:
        group: what was done; rows of one group are compared with each other. May be empty.
        who: did it.
        value: median; None where it could not be measured, and ``refused`` says why.
        unit: ``"s"``, ``"us"``, ``"MB"`` (10**6 bytes), ``"TFLOP/s"`` or ``"x"`` (a ratio of two figures).
        ratio: value over aotpack's own row.
        spread: lower and upper quartile of the measurements.
        count: of measurements.
        refused: why there is no value.
    """

    group: str
    who: str
    value: float | None
    unit: str
    ratio: float | None
    spread: tuple[float, float] | None = None
    count: int = 0
    refused: str | None = None

    @property
    def what(self) -> str:
        """Who did what."""
        known = ", ".join(filter(None, (self.group, self.who)))
        return known if self.refused is None else f"{known}: {self.refused}"

    @property
    def own(self) -> bool:
        """Whether aotpack did it."""
        return self.who.startswith(OWN)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "what": self.what,
            "value": self.value,
            "unit": self.unit,
            "ratio": self.ratio,
            "group": self.group,
            "who": self.who,
            "spread": None if self.spread is None else list(self.spread),
            "count": self.count,
        }


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
        }


def against(group: str, timings: Mapping[str, Timing | str], unit: str = "s", *, own: str = OWN) -> list[Row]:
    """Rows of one group, by who, with ratios over the one that is named ``own``.

    A string instead of a timing says why there is none.
    """
    base = timings.get(own)
    rows = []
    for who, timing in timings.items():
        if isinstance(timing, str):
            rows.append(Row(group=group, who=who, value=None, unit=unit, ratio=None, refused=timing))
            continue
        known = isinstance(base, Timing) and base.median
        rows.append(
            Row(
                group=group,
                who=who,
                value=_rounded(timing.median, 6),
                unit=unit,
                ratio=_rounded(timing.median / base.median, 4) if known else None,  # type: ignore[union-attr]
                spread=(_rounded(timing.low, 6), _rounded(timing.high, 6)),
                count=timing.count,
            )
        )
    return rows


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
