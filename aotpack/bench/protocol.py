"""How things are measured: fresh processes that answer in time, medians with quartiles."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import aotpack
from aotpack.bench.case import Case
from aotpack.errors import AotpackError

__all__ = ["TIMEOUT", "RefusedError", "Timing", "Worker", "environment", "run_job"]

TIMEOUT: Final = 900.0


class RefusedError(AotpackError):
    """What was to be measured cannot be done here; the message is what it said."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Median of some measurements, with the quartiles below and above it."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Timing:
        """From at least one measurement; of fewer than three the quartiles are the lowest and the highest."""
        known = sorted(values)
        low, high = known[0], known[-1]
        if len(known) > 2:
            low, _, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(median=statistics.median(known), low=low, high=high, count=len(known))


class Worker:
    """A fresh process that runs one job; a context manager that ends it and all it started.

    Caches and temporary files of the process are in ``folder``: the same folder again is a warm start.

    Args:
        job: ``MODULE:FUNCTION`` in ``aotpack.bench.jobs``.
        folder: made where it is missing.
        case: the function's first argument.
        timeout: seconds that each answer may take.
        more: the function's other arguments, JSON values.
    """

    def __init__(
        self, job: str, folder: Path, case: Case, /, *, timeout: float = TIMEOUT, **more: Any
    ) -> None:
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        self._job, self._timeout, self._log, self._said = job, timeout, folder / "log", b""
        with self._log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "aotpack.bench.child", job],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=environment(folder),
                bufsize=0,
                start_new_session=True,
            )
        self._tell({"case": case.to_dict(), **more})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def answer(self) -> dict[str, Any]:
        """What the function returned.

        Raises:
            RefusedError: the job could not do its work, took too long, or its process died.
        """
        answer: dict[str, Any] = json.loads(self._line())
        if "refused" in answer:
            raise RefusedError(answer["refused"])
        return answer

    def measure(self) -> dict[str, Any]:
        """One more measurement of a job that measures when it is told to; raises as ``answer``."""
        self._tell({})
        return self.answer()

    def close(self) -> None:
        """Ends what is left of the process and of the compilers it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        # A process that died says so when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        pipe, end = self._process.stdout.fileno(), time.monotonic() + self._timeout
        while b"\n" not in self._said:
            if not select.select([pipe], [], [], max(0.0, end - time.monotonic()))[0]:
                raise RefusedError(f"no answer within {self._timeout:.0f} s")
            read = os.read(pipe, 1 << 16)
            if not read:
                raise self._died()
            self._said += read
        line, _, self._said = self._said.partition(b"\n")
        return line

    def _died(self) -> RefusedError:
        code = self._process.wait()
        return RefusedError(
            f"the measuring process {self._job} ended with exit code {code}",
            found=self._log.read_text(errors="replace").strip()[-2000:] or None,
        )


def run_job(
    job: str, folder: Path, case: Case, /, *, timeout: float = TIMEOUT, **more: Any
) -> dict[str, Any]:
    """Runs a job in a fresh process to its end and returns its answer; the rest is as in ``Worker``.

    Raises:
        RefusedError: as ``Worker.answer``.
    """
    with Worker(job, folder, case, timeout=timeout, **more) as worker:
        return worker.answer()


def environment(folder: Path) -> dict[str, str]:
    source = str(Path(aotpack.__file__).parent.parent)
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH", "")])),
        "AOTPACK_CACHE": str(folder / "store"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "inductor" / "triton"),
        "TMPDIR": str(folder / "tmp"),
    }
