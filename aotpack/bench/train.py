"""``train``: a whole training step of a DFlash drafter, and how soon the first one is done."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.case import Case, Shape
from aotpack.bench.compare import entries, facts_of, group, in_turn, part_of
from aotpack.bench.protocol import RefusedError, Timing, Worker
from aotpack.bench.results import Result, against
from aotpack.bench.rivals import NAMES
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "median seconds of a training step of a drafter of five layers: mask, forward, loss, backward, AdamW;"
    " of the first one with import, load or compilation of its attention, in a fresh process whose trainer "
    "has made a step without attention; and by how much that took longer than a later step of the same "
    "process; hidden states of the target are there"
)
_CPU: Final = (Shape(context=512, anchors=128),)
_CUDA: Final = (Shape(context=4096, anchors=512),)
_NEW: Final = "aotpack, nothing unpacked yet"
_UNPACKED: Final = "aotpack, unpacked by an earlier process"


def run(settings: Settings) -> Result:
    """Measures the package's first spec."""
    name, spec = settings.first()
    (shape,) = settings.shapes(_CPU, _CUDA)
    case = settings.case(name, shape)
    settings.say(f"train {shape}: steps")
    rivals = ("aotpack", *(("flex", "flex-masked") if settings.cuda else ("sdpa",)))
    found = in_turn(settings, case, entries("training:train", rivals))
    rows = group("whole training step", found, part_of("step"))
    settings.say(f"train {shape}: first steps")
    firsts, waits = _starts(settings, case)
    rows += against("first training step", firsts, own=_NEW)
    rows += against("first training step beyond a later one", waits, own=_NEW)
    facts = {**facts_of(found), "dtype": spec.dtype, "layers": 5, "repeat": settings.repeat, **asdict(shape)}
    return Result(name="train", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _starts(settings: Settings, case: Case) -> tuple[dict[str, Timing | str], dict[str, Timing | str]]:
    """Seconds of first steps, and those less a later step of the same process; a string says why not."""
    firsts, waits = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    refused: dict[str, str] = {}
    for _ in range(settings.repeat):
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
            for who, where, more in _jobs(settings, Path(folder)):
                if who in refused:
                    continue
                try:
                    with Worker("training:train", where, case, timeout=settings.timeout, **more) as worker:
                        first, step = worker.answer()["first"], worker.measure()["step"]
                except RefusedError as refusal:
                    if who in (_NEW, _UNPACKED):
                        raise
                    refused[who] = refusal.problem
                    settings.say(f"  {who}: {refusal.problem}")
                    continue
                settings.say(f"  {who}: {first:.3f} s, a later step {step:.3f} s")
                firsts[who].append(first)
                waits[who].append(first - step)
    order = [who for who, *_ in _jobs(settings, Path())]
    first_steps, beyond = (
        {who: Timing.of(times[who]) if times[who] else refused[who] for who in order}
        for times in (firsts, waits)
    )
    return first_steps, beyond


def _jobs(settings: Settings, folder: Path) -> list[tuple[str, Path, dict[str, Any]]]:
    """Who, the folder of its caches, and the job's arguments."""
    saved = str(folder / "artifacts")
    own = {"who": "aotpack"}
    jobs: list[tuple[str, Path, dict[str, Any]]] = [
        (_NEW, folder / "own", own),
        (_UNPACKED, folder / "own", own),
    ]
    rival = "flex" if settings.cuda else "compiled-dense"
    if rival not in settings.without:
        states: dict[str, tuple[Path, dict[str, Any]]] = {
            "cold cache": (folder / "rival", {"artifacts": saved, "keep_artifacts": True}),
            "warm cache": (folder / "rival", {}),
            "mega-cache of another process": (folder / "reader", {"artifacts": saved}),
        }
        for state, (where, more) in states.items():
            jobs.append((f"{NAMES[rival]}, {state}", where, {"who": rival, **more}))
    return jobs
