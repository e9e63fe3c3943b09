"""``step``: one step's time and memory against dense attention, side by side in one run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Final

from aotpack.bench.protocol import RefusedError, Timing, run_job
from aotpack.bench.results import Result, Row, against
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "median seconds of a step's parts, both ways in turn in one process after a warm-up of each; "
    "memory is what a step takes on top of its inputs at its highest, mask included, in a fresh process"
)
_RIVAL: Final = "scaled_dot_product_attention with the dense boolean mask"
_NAMES: Final = {"aotpack": "aotpack", "sdpa": _RIVAL}
_PARTS: Final = ("mask", "forward", "backward")


def run(settings: Settings) -> Result:
    """Measures every spec of the package."""
    context, anchors = settings.context or 512, settings.anchors or 512
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    specs = settings.specs()
    with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
        for name, spec in specs.items():
            case = {
                "package": str(settings.package.absolute()),
                "spec": name,
                "context": context,
                "anchors": anchors,
            }
            label = (
                spec.dtype if len({s.dtype for s in specs.values()}) == len(specs) else f"{name} {spec.dtype}"
            )
            settings.say(f"step {label}: time")
            answer = run_job("steady:side_by_side", Path(folder), **case, repeat=settings.repeat)
            facts = answer["facts"]
            rows += _time_rows(label, answer, _slow(settings, case, Path(folder)))
            settings.say(f"step {label}: memory")
            rows += _memory_rows(label, case, Path(folder))
    shape = {"batch": 1, "context": context, "anchors": anchors}
    return Result(name="step", measured=_MEASURED, rows=tuple(rows), facts={**facts, **shape})


def _slow(settings: Settings, case: dict[str, Any], folder: Path) -> dict[str, Timing | str]:
    if not settings.slow:
        return {}
    settings.say("step: torch.compile(dense attention)")
    try:
        answer = run_job("steady:compiled_dense", folder, **case, repeat=settings.repeat)
    except RefusedError as refusal:
        return {"torch.compile(dense attention)": refusal.problem}
    return {"torch.compile(dense attention)": Timing.of(answer["seconds"])}


def _time_rows(label: str, answer: dict[str, Any], more: dict[str, Timing | str]) -> list[Row]:
    rows: list[Row] = []
    for part in ("forward+backward", *_PARTS):
        timings: dict[str, Timing | str] = {
            f"{label} {part}, {_NAMES[who]}": Timing.of(_seconds(part, step) for step in answer[who])
            for who in _NAMES
        }
        if part == "forward+backward":
            timings |= {f"{label} {part}, {what}": timing for what, timing in more.items()}
        rows += against(f"{label} {part}, aotpack", timings)
    return rows


def _seconds(part: str, step: list[float]) -> float:
    mask, forward, backward = step
    return {"mask": mask, "forward": forward, "backward": backward}.get(part, forward + backward)


def _memory_rows(label: str, case: dict[str, Any], folder: Path) -> list[Row]:
    found: dict[str, Timing | str] = {}
    for who, name in _NAMES.items():
        try:
            taken = run_job("steady:memory", folder, **case, who=who)["bytes"] / 1e6
            found[f"{label} extra memory, {name}"] = Timing.of([taken])
        except RefusedError as refusal:
            found[f"{label} extra memory, {name}"] = refusal.problem
    return against(f"{label} extra memory, aotpack", found, "MB")
