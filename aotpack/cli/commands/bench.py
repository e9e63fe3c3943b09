"""``aotpack bench``: figures beside what users have without us."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any

import click

from aotpack.bench import BENCHES, NAMES, Report, Result, Row, Settings, default_specs, run, run_all
from aotpack.bench.plot import check_matplotlib, plot
from aotpack.build import build
from aotpack.cli.console import Console, talking
from aotpack.cli.progress import BuildProgress
from aotpack.cli.text import columns, duration
from aotpack.errors import InputError

__all__ = ["bench"]

_RIVALS = [name for name in NAMES if name != "aotpack"]


@click.command()
@click.argument("name", metavar=f"{'|'.join(BENCHES)}|all", type=click.Choice([*BENCHES, "all"]))
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    help="Measure this one.  [default: build the attention of qwen2.5-0.5b-dflash]",
)
@click.option("--spec", help="Measure this spec only.  [default: step, memory: all; others: the first]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--repeat", type=click.IntRange(min=1), default=3, show_default=True, help="Measurements of each row."
)
@click.option("--batch", type=click.IntRange(min=1), help="Batch B.  [default: the bench's own]")
@click.option("--context", type=click.IntRange(min=16), help="Context tokens S.  [default: the bench's own]")
@click.option("--anchors", type=click.IntRange(min=1), help="Draft blocks N.  [default: the bench's own]")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=900.0,
    show_default=True,
    help="Seconds a rival may take to get ready, and for a measurement.",
)
@click.option(
    "--without",
    multiple=True,
    type=click.Choice(_RIVALS),
    metavar="RIVAL",
    help=f"Leave out {', '.join(_RIVALS)}; may be repeated.",
)
@click.option(
    "--from",
    "saved",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Measure nothing: show, and draw, what --save left; may be repeated, with the name 'all'.",
)
@click.option(
    "--plot", "picture", type=click.Path(path_type=Path), metavar="FILE", help="Draw the ratios, as a PNG."
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write NAME.json of each bench there as soon as it is done.",
)
@talking
def bench(
    console: Console,
    name: str,
    package: Path | None,
    saved: Sequence[Path],
    picture: Path | None,
    save: Path | None,
    **options: Any,
) -> int:
    """Measure, each beside the alternatives, in one run. Rows have ratios over aotpack's own.

    \b
    mask       a step's block mask, against create_block_mask
    step       forward and backward, against torch.compile, SDPA and cuDNN
    memory     what a step takes at its highest
    overhead   what the host pays for a call
    size       what a node reads, against .pt2 files and compile caches
    threads    two threads with twice the work, against torch's own loader
    scaling    time against visible blocks, S 512 to 8192
    train      a whole training step of five layers, and the first one
    coldstart  load and first step in fresh processes, against torch.compile
    all        all of them
    """
    if picture is not None:
        check_matplotlib()
    if saved:
        return _saved(console, name, saved, picture)
    if save is not None:
        save.mkdir(parents=True, exist_ok=True)

    def done(result: Result) -> None:
        if save is not None:
            result.write(save / f"{result.name}.json")

    names = list(BENCHES) if name == "all" else [name]
    options["without"] = frozenset(options["without"])
    with _package(console, package, names, options["device"]) as path:
        settings = Settings(package=path, say=console.say, **options)
        if name == "all":
            return _all(console, settings, picture, done)
        result = run(name, settings)
    done(result)
    console.show(result.schema, result.to_dict(), _text(result))
    if picture is not None:
        plot([result], picture)
    return 0


def _saved(console: Console, name: str, files: Sequence[Path], picture: Path | None) -> int:
    found: dict[str, Result] = {}
    for path in files:
        result = Result.read(path)
        if name not in ("all", result.name) or result.name in found:
            raise InputError(
                f"{path} is not what was asked for",
                expected="one result of each bench" if name == "all" else f"one result of {name}",
                found=f"a result of {result.name}" + (", the second" if result.name in found else ""),
                remedy="name 'all' for results of several benches, and give one file of each",
            )
        found[result.name] = result
    if name == "all":
        report = Report(results=tuple(found.values()), failed={}, left_out=())
        console.show("aotpack.bench.all/1", report.to_dict(), "\n\n".join(map(_text, report.results)))
    else:
        console.show(found[name].schema, found[name].to_dict(), _text(found[name]))
    if picture is not None:
        plot(list(found.values()), picture)
    return 0


def _all(console: Console, settings: Settings, picture: Path | None, done: Callable[[Result], None]) -> int:
    """Shows what could be measured; 1 where aotpack itself could not be."""

    def tell(result: Result) -> None:
        done(result)
        # Seen even where the run is ended before it is through.
        console.say(_text(result) + "\n")

    report = run_all(settings, tell)
    parts = [_text(result) for result in report.results]
    parts += [f"{name} failed: {why}" for name, why in report.failed.items()]
    console.show("aotpack.bench.all/1", report.to_dict(), "\n\n".join(parts))
    if picture is not None and report.results:
        plot(report.results, picture)
    return int(bool(report.failed))


@contextlib.contextmanager
def _package(console: Console, given: Path | None, names: Sequence[str], device: str) -> Iterator[Path]:
    if given is not None:
        if not given.is_file():
            raise InputError(f"there is no package at {given}", remedy="check the path, or build the package")
        yield given
        return
    dtypes = ("bfloat16", "float32") if {"step", "memory"} & set(names) else ("bfloat16",)
    with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder, BuildProgress(console) as progress:
        target, output = device.partition(":")[0], Path(folder) / "bench.aotpack"
        yield build(default_specs(*dtypes), [target], output, progress=progress).path


def _text(result: Result) -> str:
    facts = ", ".join(f"{name} {value}" for name, value in result.facts.items())
    rows = [
        [shorten(row.what, 140, placeholder=" ..."), _value(row), _spread(row), _ratio(row)]
        for row in result.rows
    ]
    table = columns(rows, ["what", "median", "quartiles", "ratio"])
    return f"{result.name}: {result.measured}\n{facts}\n\n{table}"


def _value(row: Row, value: float | None = None) -> str:
    value = row.value if value is None else value
    if value is None:
        return "-"
    return duration(value) if row.unit == "s" else f"{value:.4g} {row.unit}"


def _spread(row: Row) -> str:
    if row.spread is None or row.count < 2:
        return ""
    return " to ".join(_value(row, bound) for bound in row.spread)


def _ratio(row: Row) -> str:
    return "-" if row.ratio is None else f"{row.ratio:.2f}x"
