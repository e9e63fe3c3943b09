"""What benches share that measure rivals in turn."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotpack.bench.case import Case
from aotpack.bench.protocol import Timing
from aotpack.bench.results import Row, against
from aotpack.bench.rivals import NAMES
from aotpack.bench.settings import Settings
from aotpack.bench.turns import Entry, Turns, take_turns

__all__ = ["entries", "facts_of", "group", "in_turn", "labels", "part_of"]


def entries(job: str, rivals: Iterable[str]) -> dict[str, Entry]:
    """One job for each rival, which gets its name; folders are named by ``in_turn``."""
    return {
        who: Entry(
            job=job,
            folder=Path(who),
            more={"who": who},
            needed=who == "aotpack",
            alone=who == "flex-autotune",
        )
        for who in rivals
    }


def in_turn(settings: Settings, case: Case, known: Mapping[str, Entry]) -> dict[str, Turns | str]:
    """``take_turns`` in folders of their own, without those that the user leaves out."""
    with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
        placed = {
            who: replace(entry, folder=Path(folder) / entry.folder)
            for who, entry in known.items()
            if who in settings.wanted(known)
        }
        return take_turns(placed, case, repeat=settings.repeat, timeout=settings.timeout, say=settings.say)


def group(
    name: str,
    found: Mapping[str, Turns | str],
    figure: Callable[[Turns], Iterable[float]],
    unit: str = "s",
) -> list[Row]:
    """Rows of one figure, by the rivals' full names."""
    timings = {
        NAMES[who]: said if isinstance(said, str) else Timing.of(figure(said)) for who, said in found.items()
    }
    return against(name, timings, unit)


def part_of(name: str) -> Callable[[Turns], list[float]]:
    """One figure of every turn."""
    return lambda turns: turns.of(name)


def facts_of(found: Mapping[str, Turns | str]) -> dict[str, Any]:
    """Of aotpack's own process."""
    own = found["aotpack"]
    assert isinstance(own, Turns)
    return dict(own.info["facts"])


def labels(settings: Settings) -> dict[str, str]:
    """What rows call each spec: its dtype or, where several have it, its name too."""
    specs = settings.specs()
    plain = len({spec.dtype for spec in specs.values()}) == len(specs)
    return {name: spec.dtype if plain else f"{name} {spec.dtype}" for name, spec in specs.items()}
