"""``overhead``: what the host pays for a call, with lengths so small that nothing else is left."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Final

from aotpack.bench.case import Shape
from aotpack.bench.compare import entries, facts_of, group, in_turn, part_of
from aotpack.bench.results import Result, Row
from aotpack.bench.rivals import step_rivals
from aotpack.bench.settings import Settings
from aotpack.bench.turns import Entry

__all__ = ["run"]

_MEASURED: Final = (
    "median microseconds of the host until a call returns, mean of 200 calls each; forward and backward "
    "through autograd; on the CPU, with one thread, the small kernels are in it, and torch's own loader, "
    "which runs the same libraries without autograd, shows what they take"
)
_TINY: Final = (Shape(context=16, anchors=1),)


def run(settings: Settings) -> Result:
    """Measures the package's first spec."""
    name, spec = settings.first()
    (shape,) = settings.shapes(_TINY, _TINY)
    settings.say("overhead")
    rivals = [who for who in step_rivals(settings.device) if who != "flex-autotune"]
    known = entries("steady:overhead", rivals)
    known["torch-loader"] = Entry(job="steady:loader_overhead", folder=Path("torch-loader"))
    found = in_turn(settings, settings.case(name, shape), known)
    rows: list[Row] = []
    for part, what in {
        "forward": "forward call",
        "backward": "backward call",
        "mask": "block mask call",
    }.items():
        rows += group(f"call overhead, {what}", found, part_of(part), "us")
    facts = {**facts_of(found), "dtype": spec.dtype, "repeat": settings.repeat, **asdict(shape)}
    return Result(name="overhead", measured=_MEASURED, rows=tuple(rows), facts=facts)
