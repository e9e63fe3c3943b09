"""``aotpack demo``: build, load and train, then a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.progress import BuildProgress
from aotpack.cli.text import columns, duration, size

__all__ = ["demo"]

_EVERY: Final = 10


@click.command()
@click.option("--threads", type=click.IntRange(min=1), default=3, show_default=True, help="Drafter threads.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps.  [default: the demo's own]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Keep the package in this file.")
@talking
def demo(console: Console, output: Path | None, **lengths: int | None) -> None:
    """Build a small drafter's attention, load it, check it, and train with it from threads."""
    from aotpack.demo.run import SCHEMA, run_demo

    def step(number: int, loss: float) -> None:
        if number % _EVERY == 0:
            console.say(f"step {number}  loss {loss:.3f}")

    given: dict[str, Any] = {name: value for name, value in lengths.items() if value is not None}
    with BuildProgress(console) as progress:
        data = run_demo(output, **given, progress=progress, on_step=step)
    data.pop("schema")
    console.show(SCHEMA, data, _text(data))


def _text(data: dict[str, Any]) -> str:
    errors = ", ".join(f"{name} {value:.1e}" for name, value in data["max_rel_error"].items())
    first, last = data["loss"]["first"], data["loss"]["last"]
    return columns(
        [
            ["package", f"{size(data['package_bytes'])} for {', '.join(data['targets'])}"],
            ["build, once", duration(data["build_s"])],
            ["load", duration(data["load_ms"] / 1e3)],
            ["first step", duration(data["first_step_ms"] / 1e3)],
            ["threads", str(data["threads"])],
            ["traces and compilations while training", str(data["traces"])],
            ["largest error against dense fp64 math", errors],
            ["loss", f"{first:.3f} to {last:.3f}, {100 * (1 - last / first):.0f}% less"],
        ]
    )
