"""Rivals in processes of their own that are measured in turn, so that a slow moment hits all alike."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aotpack.bench.case import Case
from aotpack.bench.protocol import RefusedError, Worker

__all__ = ["Entry", "Turns", "take_turns"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """Who is measured.

    Attributes:
        job: that returns what it says once and a function that measures once.
        folder: of its process.
        more: further arguments of the job.
        needed: whether the bench ends where this one fails.
        alone: whether it gets ready when all others have, because it measures as it does.
    """

    job: str
    folder: Path
    more: Mapping[str, Any] = field(default_factory=dict)
    needed: bool = False
    alone: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """What one said: ``info`` once it was ready, ``turns`` one for each measurement, at least one."""

    info: Mapping[str, Any]
    turns: list[dict[str, float]]

    def of(self, name: str) -> list[float]:
        """One figure of every turn."""
        return [turn[name] for turn in self.turns]


def take_turns(
    entries: Mapping[str, Entry], case: Case, *, repeat: int, timeout: float, say: Callable[[str], None]
) -> dict[str, Turns | str]:
    """Starts all, then measures each ``repeat`` times in turn.

    Returns:
        what each said, or why there is nothing; one that fails later keeps what it has.

    Raises:
        RefusedError: one that is needed failed.
    """
    found: dict[str, Turns | str] = {}
    workers: dict[str, Worker] = {}
    with contextlib.ExitStack() as stack:
        for alone in (False, True):
            chosen = {who: entry for who, entry in entries.items() if entry.alone is alone}
            started = {
                who: stack.enter_context(_start(entry, case, timeout)) for who, entry in chosen.items()
            }
            for who, worker in started.items():
                start = time.monotonic()
                try:
                    found[who] = Turns(info=worker.answer(), turns=[])
                except RefusedError as refusal:
                    found[who] = _refused(who, entries[who], refusal, say)
                    worker.close()
                    continue
                workers[who] = worker
                say(f"  {who}: ready after {time.monotonic() - start:.1f} s more")
        for _ in range(repeat):
            for who in [who for who in entries if who in workers]:
                _turn(who, entries[who], workers, found, say)
    return {who: found[who] for who in entries}


def _start(entry: Entry, case: Case, timeout: float) -> Worker:
    return Worker(entry.job, entry.folder, case, timeout=timeout, **entry.more)


def _turn(
    who: str,
    entry: Entry,
    workers: dict[str, Worker],
    found: dict[str, Turns | str],
    say: Callable[[str], None],
) -> None:
    known = found[who]
    assert isinstance(known, Turns)
    try:
        known.turns.append(workers[who].measure())
    except RefusedError as refusal:
        workers.pop(who).close()
        why = _refused(who, entry, refusal, say)
        if not known.turns:
            found[who] = why
        return
    say(f"  {who}: {_figures(known.turns[-1])}")


def _refused(who: str, entry: Entry, refusal: RefusedError, say: Callable[[str], None]) -> str:
    if entry.needed:
        raise refusal
    say(f"  {who}: {refusal.problem}")
    return refusal.problem


def _figures(turn: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in turn.items())
