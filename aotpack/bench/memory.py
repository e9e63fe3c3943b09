"""``memory``: what a step takes on top of its inputs, at its highest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.case import Case, Shape
from aotpack.bench.compare import labels
from aotpack.bench.protocol import RefusedError, Timing, run_job
from aotpack.bench.results import Result, Row, against
from aotpack.bench.rivals import NAMES, step_rivals
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "median MB that a step, mask, forward and backward, takes on top of its inputs at its highest, each "
    "in a fresh process: the peak of the allocator on CUDA, of the process's own memory on the CPU"
)
_CPU: Final = (Shape(context=512, anchors=512),)
_CUDA: Final = (Shape(context=4096, anchors=512), Shape(batch=4, context=3072, anchors=512))


def run(settings: Settings) -> Result:
    """Measures every spec of the package at every shape."""
    shapes = settings.shapes(_CPU, _CUDA)
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    rivals = settings.wanted(who for who in step_rivals(settings.device) if who != "flex-autotune")
    for name, label in labels(settings).items():
        for shape in shapes:
            settings.say(f"memory {label} {shape}")
            found, process = _measure(settings, settings.case(name, shape), rivals)
            facts |= process
            rows += against(f"{label} {shape} extra memory", found, "MB")
    # The allocator's peak is the same every time.
    facts |= {
        "repeat": 1 if settings.cuda else settings.repeat,
        "shapes": [asdict(shape) for shape in shapes],
    }
    return Result(name="memory", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _measure(
    settings: Settings, case: Case, rivals: Iterable[str]
) -> tuple[dict[str, Timing | str], dict[str, Any]]:
    found: dict[str, Timing | str] = {}
    facts: dict[str, Any] = {}
    for who in rivals:
        taken: list[float] = []
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
            for _ in range(1 if settings.cuda else settings.repeat):
                try:
                    answer = run_job("peak:memory", Path(folder), case, timeout=settings.timeout, who=who)
                except RefusedError as refusal:
                    if who == "aotpack":
                        raise
                    found[NAMES[who]] = refusal.problem
                    settings.say(f"  {who}: {refusal.problem}")
                    break
                taken.append(answer["bytes"] / 1e6)
                facts = answer["facts"]
                settings.say(f"  {who}: {taken[-1]:.1f} MB")
        if taken:
            found[NAMES[who]] = Timing.of(taken)
    return found, facts
