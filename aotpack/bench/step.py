"""``step``: forward and backward of one step, and the rate that they reach, side by side in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.case import Shape
from aotpack.bench.compare import entries, facts_of, group, in_turn, labels, part_of
from aotpack.bench.results import Result, Row
from aotpack.bench.rivals import step_rivals
from aotpack.bench.settings import Settings
from aotpack.bench.turns import Entry, Turns
from aotpack.spec import AttentionSpec

__all__ = ["run"]

_MEASURED: Final = (
    "median seconds of a step's parts through autograd, masks made before, each rival in a process of its"
    " own, warm, all measured in turn; device events on CUDA, wall time on the CPU; a rate counts the "
    "cells that the mask shows, and five matrix products in backward to two in forward"
)
_CPU: Final = (Shape(context=512, anchors=512),)
_CUDA: Final = (Shape(context=4096, anchors=512), Shape(batch=4, context=3072, anchors=512))
_PARTS: Final = ("forward", "backward")


def run(settings: Settings) -> Result:
    """Measures every spec of the package at every shape."""
    shapes = settings.shapes(_CPU, _CUDA)
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    specs = settings.specs()
    for name, label in labels(settings).items():
        for shape in shapes:
            where = f"{label} {shape}" if len(shapes) > 1 else label
            settings.say(f"step {where}")
            known = entries("steady:step", step_rivals(settings.device))
            if settings.cuda:
                known["cudnn"] = Entry(job="steady:ceiling", folder=Path("cudnn"))
            found = in_turn(settings, settings.case(name, shape), known)
            facts |= facts_of(found)
            rows += _rows(where, specs[name], found)
    facts["repeat"] = settings.repeat
    facts |= asdict(shapes[0]) if len(shapes) == 1 else {"shapes": [asdict(shape) for shape in shapes]}
    return Result(name="step", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _rows(where: str, spec: AttentionSpec, found: dict[str, Turns | str]) -> list[Row]:
    times = {who: said for who, said in found.items() if who != "cudnn"}
    rows = group(f"{where} forward+backward", times, _both)
    for part in _PARTS:
        rows += group(f"{where} {part}", times, part_of(part))
    own, top = found["aotpack"], found.get("cudnn")
    assert isinstance(own, Turns)
    for part, work in _work(spec, own.info).items():
        rate = _rate(part, work)
        rates = {**times, **({} if top is None else {"cudnn": top})}
        rows += group(f"{where} {part} rate", rates, rate, "TFLOP/s")
        if isinstance(top, Turns):
            shares = _share(rate, statistics.median(rate(top)))
            rows += group(f"{where} {part} share of the ceiling", times, shares, "x")
    return rows


def _both(turns: Turns) -> Iterable[float]:
    return (sum(turn[part] for part in _PARTS) for turn in turns.turns)


def _work(spec: AttentionSpec, info: Mapping[str, Any]) -> dict[str, float]:
    """Floating-point operations on the cells that the mask shows.

    Forward multiplies q k^T and p v; backward q k^T again, dout v^T, p^T dout, ds k and ds^T q.
    """
    qk, pv = 2 * spec.head_dim * info["cells"], 2 * spec.value_dim * info["cells"]
    return {"forward": qk + pv, "backward": 3 * qk + 2 * pv}


def _rate(part: str, work: float) -> Callable[[Turns], list[float]]:
    """TFLOP/s of some work; the ceiling's own work is another, and it says its rate itself."""

    def rates(turns: Turns) -> list[float]:
        if "rate" in turns.info:
            return [value / 1e12 for value in turns.of(part)]
        return [work / seconds / 1e12 for seconds in turns.of(part)]

    return rates


def _share(rate: Callable[[Turns], list[float]], ceiling: float) -> Callable[[Turns], list[float]]:
    return lambda turns: [each / ceiling for each in rate(turns)]
