"""``aotpack tune``: candidates are measured here, and what was best becomes a record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.text import columns, duration
from aotpack.errors import SelfTestError
from aotpack.tuning import Entry, Measured, mean

if TYPE_CHECKING:
    from aotpack.bench.tune import Report

__all__ = ["describe", "show_failures", "tune"]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    "record",
    required=True,
    type=click.Path(path_type=Path),
    help="The tuning record; what it has already is kept.",
)
@click.option("--device", default="cuda", show_default=True, help="cuda or cuda:N.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each candidate."
)
@click.option(
    "--checks",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    help="Times that each result is computed again and must be the same.",
)
@click.option("--again", is_flag=True, help="Measure also what the record has.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds a candidate may take to get ready, and for a turn.",
)
@talking
def tune(console: Console, folder: Path, record: Path, **options: Any) -> int:
    """Measure candidate kernels on this machine's GPU and write which are best.

    FOLDER is what 'aotpack build --tune --candidates FOLDER' made, here or on another machine. Every
    candidate's results are checked first; one that is wrong is never chosen. The record is written as it
    grows, and a run that was stopped goes on where it was.
    """
    from aotpack.bench.tune import tune as measure

    report = measure(folder, record, **options, say=console.say, detail=console.detail)
    data, text = describe(record, report)
    console.show("aotpack.tune/1", data, text)
    return show_failures(console, report)


def describe(path: Path, report: Report) -> tuple[dict[str, Any], str]:
    """The command's result, as JSON values and as text."""
    record = report.record
    data = {
        "record": str(path),
        "digest": record.digest,
        "chip": str(record.chip),
        "measured": list(report.measured),
        "without": list(report.without),
        "chosen": [_entry(entry) for entry in record.entries],
    }
    rows = [
        [entry.kernels, entry.length_class, entry.direction, _words(entry), _time(entry)]
        for entry in record.entries
    ]
    head = f"{path}: {record.chip}, digest {record.digest}"
    return data, f"{head}\n{columns(rows, ['kernels', 'lengths', 'direction', 'options', 'over untuned'])}"


def show_failures(console: Console, report: Report) -> int:
    """Says which groups have no choice; the exit code."""
    if not report.without:
        return 0
    console.say(f"aotpack: no candidate may be chosen for {', '.join(report.without)}")
    return SelfTestError.exit_code


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "kernels": entry.kernels,
        "class": entry.length_class,
        "direction": entry.direction,
        "attention": entry.attention.to_dict(),
        "options": dict(entry.options),
        "right": sum(each.ok for each in entry.candidates),
        "candidates": len(entry.candidates),
    }


def _words(entry: Entry) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.options.items()) or "untuned"


def _time(entry: Entry) -> str:
    """Mean time of the choice, and its ratio to the untuned candidate's."""
    chosen = [each for each in entry.candidates if each.ok and each.options == entry.options]
    if not chosen:
        return ""
    untuned: Measured = entry.candidates[0]
    ratio = f", {mean(chosen[0]) / mean(untuned):.2f}x" if untuned.ok else ""
    return f"{duration(mean(chosen[0]))}{ratio}"
