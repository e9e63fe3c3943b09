"""Private files of the store: written under another name and renamed, so that nobody sees half of one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Final

__all__ = ["keep_file", "make_folder", "open_regular", "sweep_temporaries"]

_SUFFIX: Final = ".tmp"


def make_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for this user alone.

    Raises:
        OSError: it cannot be made.
    """
    # Not parents=True, which leaves the parents' permissions to the umask.
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file, open for reading.

    Raises:
        OSError: there is none; a link or a named pipe is none.
    """
    # Neither a link out of the store nor a named pipe that never ends.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is not a file")
        yield file


def keep_file(path: Path, data: bytes, mode: int = 0o400) -> None:
    """Write a file as a whole, whatever is there; where that is not possible, nothing is kept."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_SUFFIX}")
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(fd, "wb") as file:
                # While it is held, nobody takes the file for what a killed process left.
                fcntl.flock(fd, fcntl.LOCK_EX)
                file.write(data)
                file.flush()
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def sweep_temporaries(folder: Path) -> None:
    """Delete what killed processes left of files that they were writing."""
    for path in folder.glob(f".*{_SUFFIX}"):
        with contextlib.suppress(OSError), open_regular(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
