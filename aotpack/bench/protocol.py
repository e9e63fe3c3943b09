"""How things are measured: warm-ups, medians with spread, rivals in turn, fresh processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aotpack
from aotpack.errors import AotpackError

__all__ = ["RefusedError", "Timing", "in_turn", "run_job", "seconds"]

_TIMEOUT: Final = 1800.0


class RefusedError(AotpackError):
    """What was to be measured cannot be done here; the message is what it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Median of some measurements, with the lowest and the highest of them."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Timing:
        """From at least one measurement."""
        known = sorted(values)
        return cls(median=statistics.median(known), low=known[0], high=known[-1])


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def in_turn(
    calls: Mapping[str, Callable[[], object]], *, warmups: int, repeat: int
) -> dict[str, list[float]]:
    """Seconds of each call, ``repeat`` of each; taking turns, so that a slow moment hits all alike."""
    for _ in range(warmups):
        for call in calls.values():
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeat):
        for name, call in calls.items():
            times[name].append(seconds(call))
    return times


def run_job(job: str, folder: Path, /, **arguments: Any) -> dict[str, Any]:
    """Runs ``aotpack.bench.jobs.MODULE:FUNCTION`` in a fresh process and returns what it returns.

    Caches and temporary files of the process are in ``folder``: the same folder again is a warm start.

    Raises:
        RefusedError: the job could not do its work, or its process died.
    """
    (folder / "tmp").mkdir(parents=True, exist_ok=True)
    log = folder / "log"
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-m", "aotpack.bench.child", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=_environment(folder),
            start_new_session=True,
        )
        try:
            said, _ = process.communicate(json.dumps(arguments), timeout=_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise RefusedError(f"no answer within {_TIMEOUT:.0f} s") from error
        finally:
            _end(process)
    lines = said.splitlines()
    if process.returncode != 0 or not lines:
        raise RefusedError(
            f"the measuring process {job} ended with exit code {process.returncode}",
            found=log.read_text(errors="replace").strip()[-2000:] or None,
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    if "refused" in answer:
        raise RefusedError(answer["refused"])
    return answer


def _environment(folder: Path) -> dict[str, str]:
    source = str(Path(aotpack.__file__).parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")])),
        "AOTPACK_CACHE": str(folder / "store"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder / "tmp"),
    }


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a process and of the compilers it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
