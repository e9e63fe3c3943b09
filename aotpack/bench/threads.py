"""``threads``: what a second thread costs, here and with torch's own loader."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.case import Shape
from aotpack.bench.protocol import Timing, run_job
from aotpack.bench.results import Result, Row, against
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "median seconds of forward+backward calls on one intra-op thread each; aotpack's through autograd, "
    "torch's loader runs the same libraries without it; 'x' is two threads that do twice the work over "
    "one, 1 is perfect"
)
_NAMES: Final = {
    "aotpack": "aotpack",
    "torch": "torch's AOTIModelPackageLoader, same libraries",
    "machine": "torch.mm, which holds no lock: what this machine can do now",
}
_LASTING: Final = 1.0


def run(settings: Settings) -> Result:
    """Measures the package's first spec."""
    name, spec = settings.first()
    (shape,) = settings.shapes([Shape(context=512, anchors=64)], [])
    settings.say("threads")
    with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
        answer = run_job(
            "parallel:two_threads",
            Path(folder),
            settings.case(name, shape),
            timeout=settings.timeout,
            repeat=settings.repeat,
            lasting=_LASTING,
        )
    facts = {**answer["facts"], "dtype": spec.dtype, "repeat": settings.repeat, **asdict(shape)}
    facts["calls"] = answer["calls"]
    return Result(name="threads", measured=_MEASURED, rows=tuple(_rows(answer)), facts=facts)


def _rows(answer: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for what, unit in (
        ("two threads with twice the work over one", "x"),
        ("one thread", "s"),
        ("two threads, twice the work", "s"),
    ):
        # The machine's own work is other work: only its scaling can be compared.
        names = _NAMES if unit == "x" else {who: name for who, name in _NAMES.items() if who != "machine"}
        timings: dict[str, Timing | str] = {
            name: Timing.of(_figure(what, *pair) for pair in answer[who]) for who, name in names.items()
        }
        rows += against(what, timings, unit)
    return rows


def _figure(what: str, one: float, two: float) -> float:
    if what.endswith("over one"):
        return two / one
    return one if what.startswith("one") else two
