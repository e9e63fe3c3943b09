"""Ratios as bars in a PNG: aotpack's row is 1, and a rival's bar is how many times as much it takes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

from aotpack.bench.results import Result, Row
from aotpack.errors import HostError
from aotpack.files import replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_matplotlib", "plot"]

_OURS, _RIVAL, _REFUSED = "#d1495b", "#8d99ae", "#adb5bd"
_ROW: Final = 0.27
_HEAD: Final = 1.1
_DPI: Final = 130
_LOG_FROM: Final = 12.0
# Of the rates, more is better: they would have to be read the other way round.
_COSTS: Final = ("s", "us", "MB")


def check_matplotlib() -> None:
    """Raises ``HostError`` where matplotlib is missing, before anything is measured for nothing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise HostError(
            "plots are drawn by matplotlib, which cannot be imported",
            expected="matplotlib",
            found=error,
            remedy='pip install "aotpack[plot]"',
        ) from error


def plot(results: Sequence[Result], path: Path) -> None:
    """Writes a PNG, one panel for each result, its rows from top to bottom.

    Raises:
        HostError: matplotlib is missing.
        OutputError: the path cannot be written.
    """
    check_matplotlib()
    # Not pyplot, which would keep the figure, and look for a screen.
    from matplotlib.figure import Figure

    drawn = [(result, _groups(result)) for result in results]
    lines = [max(1, sum(len(rows) + bool(rows[0].group) for rows in groups)) for _, groups in drawn]
    figure = Figure(figsize=(13, sum(_ROW * each + _HEAD for each in lines)), dpi=_DPI, layout="constrained")
    axes = figure.subplots(
        len(drawn), 1, squeeze=False, height_ratios=[_ROW * each + _HEAD for each in lines]
    )
    for axis, (result, groups) in zip(axes[:, 0], drawn, strict=True):
        _panel(axis, result, groups)
    image = io.BytesIO()
    figure.savefig(image, format="png")
    replace_file(path, image.getvalue())


def _groups(result: Result) -> list[list[Row]]:
    """Rows that are drawn, by group; rows with figures of which less is better, or none."""
    found: dict[str, list[Row]] = {}
    for row in result.rows:
        if row.unit in _COSTS or (row.unit == "x" and "share" not in row.group):
            found.setdefault(row.group, []).append(row)
    return list(found.values())


def _panel(axis: Axes, result: Result, groups: list[list[Row]]) -> None:
    ratios = [row.ratio for rows in groups for row in rows if row.ratio]
    high, low = max(ratios, default=1.0), min(ratios, default=1.0)
    logarithmic = high / low > _LOG_FROM
    left = 10.0 ** _floor(min(low, 0.5)) if logarithmic else 0.0
    ticks: list[float] = []
    names: list[Any] = []
    line = 0
    for rows in groups:
        if rows[0].group:
            ticks.append(line)
            names.append(rows[0].group)
            line += 1
        for row in rows:
            ticks.append(line)
            names.append(shorten(row.who, 74, placeholder=" ..."))
            _bar(axis, line, row, left)
            line += 1
    axis.set_yticks(ticks, names, fontsize=8)
    grouped = {rows[0].group for rows in groups}
    own = {row.who for rows in groups for row in rows if row.own}
    for label in axis.get_yticklabels():
        text = label.get_text()
        if text in grouped or text in own:
            label.set_fontweight("bold")
            label.set_color(_OURS if text in own else "black")
    axis.set_ylim(max(line, 1) - 0.3, -0.7)
    if logarithmic:
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlim(left, high * 30)
    else:
        axis.set_xlim(0, high * 1.45)
    axis.axvline(1.0, color=_OURS, linewidth=0.8, linestyle=":")
    axis.set_xlabel("times aotpack's, less is better" + (" (logarithmic)" if logarithmic else ""), fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.set_title(
        f"aotpack bench {result.name} on {_where(result)}", loc="left", fontsize=10, fontweight="bold"
    )


def _bar(axis: Axes, line: int, row: Row, left: float) -> None:
    if row.ratio is None:
        text = shorten(row.refused or "no ratio", 70, placeholder=" ...")
        place, color = max(left, 0.0) or 0.0, _REFUSED
        axis.text(place, line, f"  not measured: {text}" if row.refused else f"  {_value(row)}",
                  va="center", fontsize=7, color=color if row.refused else "black")  # fmt: skip
        return
    axis.barh(line, row.ratio - left, left=left, height=0.72, color=_OURS if row.own else _RIVAL)
    axis.text(row.ratio, line, f"  {_digits(row.ratio)}x   {_value(row)}", va="center", fontsize=7.5)


def _value(row: Row) -> str:
    value, unit = row.value or 0.0, row.unit
    if unit == "s" and value < 1:
        value, unit = (1e3 * value, "ms") if value >= 1e-3 else (1e6 * value, "us")
    return "" if unit == "x" else f"({_digits(value)} {unit})"


def _digits(value: float) -> str:
    """Three digits, and thousands not as a power of ten."""
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _where(result: Result) -> str:
    facts = result.facts
    place = facts.get("device") or f"CPU, {facts.get('torch_threads', '?')} threads"
    lengths = {"batch": "B", "context": "S", "anchors": "N"}
    known = " ".join(f"{short} {facts[name]}" for name, short in lengths.items() if name in facts)
    parts = (place, f"torch {facts.get('torch', '?')}", facts.get("dtype"), known)
    return ", ".join(str(part) for part in parts if part)


def _floor(value: float) -> int:
    """The power of ten below a value."""
    return int(f"{value:e}".partition("e")[2])
