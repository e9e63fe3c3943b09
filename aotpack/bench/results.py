"""What a bench found: rows, each with its ratio over aotpack's own row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from aotpack.bench.protocol import Timing
from aotpack.errors import InputError
from aotpack.fields import Document, Fields, Form
from aotpack.files import read_file, replace_file

__all__ = ["OWN", "Result", "Row", "against"]

OWN: Final = "aotpack"
_LIMIT: Final = 16 << 20
_WORDS: Final = Form(r"[ -~]{0,4000}", "printable ASCII")
_UNIT: Final = Form(r"s|us|MB|TFLOP/s|x", "s, us, MB, TFLOP/s or x")
_SCHEMA: Final = Form(r"aotpack\.bench\.[a-z]+/1", "aotpack.bench.NAME/1")


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

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """Inverse of ``to_dict``; an ``IntegrityError`` names a field that is wrong."""
        group, who, what = (fields.text(name, _WORDS) for name in ("group", "who", "what"))
        value, ratio, spread = (_numbers(fields, name) for name in ("value", "ratio", "spread"))
        row = cls(
            group=group,
            who=who,
            value=None if value is None else value[0],
            unit=fields.text("unit", _UNIT),
            ratio=None if ratio is None else ratio[0],
            spread=None if spread is None else (spread[0], spread[-1]),
            count=fields.integer("count", 0, 1 << 31),
            refused=what.partition(": ")[2] or "it has no value" if value is None else None,
        )
        fields.finish()
        return row


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

    def write(self, path: Path) -> None:
        """As JSON; ``OutputError`` where it cannot be."""
        text = json.dumps({"schema": self.schema, **self.to_dict()}, indent=2, allow_nan=False)
        replace_file(path, text.encode() + b"\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """What ``write`` wrote.

        Raises:
            InputError: there is no such file.
            IntegrityError: it is no result of a bench; the field that is wrong is named.
        """
        data = read_file(path, _LIMIT)
        if data is None:
            raise InputError(f"there is no result at {path}", remedy="give a NAME.json that --save left")
        fields = Document(str(path), "measure again with 'aotpack bench NAME --save FOLDER'").read(data)
        result = cls(
            name=fields.text("schema", _SCHEMA).split(".")[2].partition("/")[0],
            measured=fields.text("measured", _WORDS),
            rows=tuple(map(Row.of, fields.tables("rows"))),
            facts=fields.plain("facts"),
        )
        fields.finish()
        return result


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


def _numbers(fields: Fields, name: str) -> list[float] | None:
    """One number or, of a spread, two; of a difference they may be negative."""
    value = fields.value(name)
    if value is None:
        return None
    given = value if isinstance(value, list) else [value]
    found = [float(n) for n in given if isinstance(n, (int, float))]
    if len(given) != 1 + (name == "spread") or len(found) != len(given):
        fields.wrong(name, "two numbers, or null" if name == "spread" else "a number, or null")
    return found


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
