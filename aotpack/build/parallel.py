"""Independent parts of a build side by side: each in a fork of the worker, with caches of its own, and every
compiler at the same addresses."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, Final

from aotpack.errors import AotpackError, BuildError

__all__ = ["fixed_addresses", "side_by_side", "usable_cores"]

# From Linux' <sys/personality.h>; the second asks without changing anything.
_NO_RANDOM_ADDRESSES: Final = 0x0040000
_ASK: Final = 0xFFFFFFFF
_FORK: Final = multiprocessing.get_context("fork")


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0))


def fixed_addresses() -> bool:
    """Gives every program that this process starts from now on the same addresses in each run.

    ptxas orders some of what it schedules by address: one large kernel for sm_100 came out in two forms, six
    runs in a row gave both (ptxas 13, the sm_100 one of triton 3.8.0). False where the system forbids it, as
    some containers do; then such a kernel may differ between two builds.
    """
    libc = ctypes.CDLL(None)
    now: int = libc.personality(_ASK)
    return now != -1 and libc.personality(now | _NO_RANDOM_ADDRESSES) != -1


def side_by_side(tasks: Sequence[Callable[[], Any]], folder: Path, jobs: int) -> list[Any]:
    """Runs each task in a fork of this process, at most ``jobs`` at a time.

    Every task starts from the state that this process has now, so what it makes does not depend on the
    others, and compiles in a folder of its own below ``folder``.

    Returns:
        The tasks' results, which are pickled, in the tasks' order.

    Raises:
        AotpackError: what a task raised; the tasks that still run are stopped.
        BuildError: a task's process was killed.
        SystemExit: a task raised something else, which is on stderr.
    """
    results: list[Any] = [None] * len(tasks)
    waiting = list(enumerate(tasks))[::-1]
    running: dict[Any, tuple[int, ForkProcess]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                number, task = waiting.pop()
                ours, theirs = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_run, args=(task, folder / f"part-{number}", theirs))
                process.start()
                theirs.close()
                running[ours] = number, process
            for ready in wait(list(running)):
                number, process = running.pop(ready)
                results[number] = _result(ready, process)
    finally:
        for _, process in running.values():
            process.kill()
            process.join()
    return results


def _result(ours: Any, process: ForkProcess) -> Any:
    try:
        done, result = ours.recv()
    except EOFError:
        process.join()
        if process.exitcode == 1:
            sys.exit(1)  # with its traceback on stderr, as if it had been raised here
        raise BuildError(
            "a process of the build died",
            found=f"exit code {process.exitcode}",
            remedy="build with fewer jobs if the machine ran out of memory",
        ) from None
    finally:
        ours.close()
    process.join()
    if not done:
        raise result
    return result


def _run(task: Callable[[], Any], folder: Path, theirs: Connection) -> None:
    # Both are mapped away by the compiler's wrapper (toolchain.hide_paths).
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    try:
        theirs.send((True, task()))
    except AotpackError as error:
        theirs.send((False, error))
