"""A lock between processes, and between threads: ``flock`` on a file of its own.

The system frees it when its holder ends, however it ends. Not ``filelock``, whose import takes longer than
unpacking a variant.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

__all__ = ["locked"]

_POLL: Final = 0.02


@contextlib.contextmanager
def locked(path: Path, seconds: float) -> Iterator[None]:
    """Inside, nobody else holds the lock of that file, which is made where it is missing and stays.

    Args:
        path: in a folder that is there.
        seconds: to wait for it at most; 0 only tries.

    Raises:
        TimeoutError: somebody else has held it all the time.
        OSError: the file cannot be made, or its file system has no locks (``ENOSYS``, ``ENOLCK`` or
            ``ENOTSUP``).
    """
    end = time.monotonic() + seconds
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while not _taken(fd):
            if time.monotonic() >= end:
                raise TimeoutError(f"{path} was held for {seconds:.0f} seconds")
            time.sleep(_POLL)
        yield
    finally:
        # Closing alone would leave it to a process that was forked meanwhile.
        fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _taken(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
