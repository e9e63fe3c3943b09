"""Where the bytes of a package come from: anything that reads a range of them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Protocol

from aotpack.errors import HostError, InputError, IntegrityError

__all__ = ["FileSource", "Source"]


class Source(Protocol):
    """A package's bytes. Calls may come from several threads at once."""

    @property
    def name(self) -> str:
        """Where the bytes are, for messages."""
        ...

    @property
    def size(self) -> int:
        """Number of bytes there are."""
        ...

    def read_range(self, offset: int, size: int) -> bytes:
        """Bytes ``offset`` to ``offset + size``; fewer only where the source ends before."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...


class FileSource:
    """A regular file, held open: a file that is replaced meanwhile is read to its end as it was.

    Raises:
        InputError: the path is not there, is not a regular file, or may not be read.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._name = str(Path(path))
        try:
            # O_NONBLOCK: a named pipe must not block the open.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise _unreadable(self._name, error) from error
        facts = os.fstat(self._fd)
        self._size = facts.st_size
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise InputError(f"{self._name} is not a file", remedy="name an .aotpack file")

    @property
    def name(self) -> str:
        """The path."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self._size

    def read_range(self, offset: int, size: int) -> bytes:
        """Bytes ``offset`` to ``offset + size``; fewer at the end of the file."""
        parts: list[bytes] = []
        try:
            while size > 0 and (part := os.pread(self._fd, size, offset)):
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError as error:
            problem = f"{self._name} cannot be read: {error.strerror}"
            raise HostError(problem, remedy="check the disk or the network file system") from error
        return b"".join(parts)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_exactly(source: Source, offset: int, size: int, what: str) -> bytes:
    """A whole range.

    Raises:
        IntegrityError: the source ends before.
    """
    data = source.read_range(offset, size)
    if len(data) != size:
        raise IntegrityError(
            f"{source.name} is truncated: {what} is not whole",
            expected=f"{size} bytes at offset {offset}",
            found=f"{len(data)} bytes",
            remedy="fetch or build the package again",
        )
    return data


def _unreadable(name: str, error: OSError | ValueError) -> InputError:
    if isinstance(error, OSError) and error.errno == errno.ENOENT:
        return InputError(f"there is no package at {name}", remedy="check the path, or build the package")
    reason = error.strerror if isinstance(error, OSError) else error
    return InputError(f"{name} cannot be opened: {reason}", remedy="check the path and its permissions")
