"""``aotpack bench``: figures beside what users have without us."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from aotpack.bench import BENCHES, Result, Row, Settings, default_specs, run
from aotpack.build import build
from aotpack.cli.console import Console, talking
from aotpack.cli.progress import BuildProgress
from aotpack.cli.text import columns, duration
from aotpack.errors import InputError

__all__ = ["bench"]


@click.command()
@click.argument("name", metavar=f"{'|'.join(BENCHES)}|all", type=click.Choice([*BENCHES, "all"]))
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    help="Measure this one.  [default: build the attention of qwen2.5-0.5b-dflash]",
)
@click.option("--device", default="cpu", show_default=True, help="coldstart: cpu, cuda or cuda:N.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Measurements of each row."
)
@click.option("--context", type=click.IntRange(min=16), help="Context tokens S.  [default: the bench's own]")
@click.option("--anchors", type=click.IntRange(min=1), help="Draft blocks N.  [default: the bench's own]")
@click.option("--slow", is_flag=True, help="step: also torch.compile'd dense math, which takes minutes.")
@talking
def bench(console: Console, name: str, package: Path | None, **options: Any) -> None:
    """Measure, each beside the alternatives, in one run.

    \b
    coldstart  load and first step in fresh processes, against torch.compile
    step       forward, backward and memory, against dense attention
    threads    two threads with twice the work, against torch's own loader
    """
    names = list(BENCHES) if name == "all" else [name]
    with _package(console, package, names, options["device"]) as path:
        settings = Settings(package=path, say=console.say, **options)
        results = [run(each, settings) for each in names]
    text = "\n\n".join(_text(result) for result in results)
    if name == "all":
        console.show("aotpack.bench.all/1", _together(results), text)
    else:
        console.show(results[0].schema, results[0].to_dict(), text)


@contextlib.contextmanager
def _package(console: Console, given: Path | None, names: Sequence[str], device: str) -> Iterator[Path]:
    if given is not None:
        if not given.is_file():
            raise InputError(f"there is no package at {given}", remedy="check the path, or build the package")
        yield given
        return
    dtypes = ("bfloat16", "float32") if "step" in names else ("bfloat16",)
    with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder, BuildProgress(console) as progress:
        target, output = device.partition(":")[0], Path(folder) / "bench.aotpack"
        yield build(default_specs(*dtypes), [target], output, progress=progress).path


def _together(results: Sequence[Result]) -> dict[str, Any]:
    parts = {result.name: result.to_dict() for result in results}
    rows = [
        {**row, "what": f"{name}: {row['what']}"} for name, part in parts.items() for row in part.pop("rows")
    ]
    return {"rows": rows, **parts}


def _text(result: Result) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result.facts.items())
    rows = [[row.what, _value(row), _spread(row), _ratio(row)] for row in result.rows]
    table = columns(rows, ["what", "median", "lowest to highest", "ratio"])
    return f"{result.name}: {result.measured}\n{facts}\n\n{table}"


def _value(row: Row, value: float | None = None) -> str:
    value = row.value if value is None else value
    if value is None:
        return "-"
    return duration(value) if row.unit == "s" else f"{value:.4g} {row.unit}"


def _spread(row: Row) -> str:
    return "" if row.spread is None else " to ".join(_value(row, bound) for bound in row.spread)


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.2f}x"
