"""Small files: read to a limit, created once, or replaced as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from aotpack.errors import InputError, OutputError

__all__ = ["check_writable", "create_file", "read_file", "replace_file"]

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def read_file(path: Path, limit: int, *, private: bool = False) -> bytes | None:
    """The first ``limit + 1`` bytes of a file, None where there is none.

    Raises:
        InputError: not a file that can be read; with ``private``, one that others than its owner can reach.
    """
    try:
        with open(path, "rb", opener=_open) as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(limit + 1) if stat.S_ISREG(mode) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read: {_reason(error)}"
        raise InputError(problem, remedy="check the path and its permissions") from error
    if data is None:
        raise InputError(f"{path} is not a file", remedy="name a file, or remove what is there")
    if private and mode & _OTHERS:
        raise InputError(
            f"{path} is a private key that other users can reach",
            expected="permissions 600",
            found=f"permissions {stat.S_IMODE(mode):o}",
            remedy=f"chmod 600 {path}, and make a new key if somebody may have read this one",
        )
    return data


def check_writable(path: Path) -> None:
    """Raises ``OutputError`` where a file could not be put; found out before long work, not after."""
    if reason := _unwritable(path):
        raise OutputError(
            f"{path} cannot be written",
            expected="a file in a folder that exists and is writable",
            found=reason,
            remedy="choose another path with -o",
        )


def create_file(path: Path, data: bytes, mode: int) -> None:
    """Write a file that was not there before.

    Raises:
        OutputError: something is there, or the path cannot be written; nothing is left of what was begun.
    """
    with _writing(path):
        _create(path, [data], mode)


def replace_file(path: Path, *parts: bytes) -> None:
    """Put a whole file where another may have been; who reads meanwhile sees one or the other.

    Raises:
        OutputError: the path cannot be written; what was there is still there.
    """
    temporary = path.with_name(f".aotpack-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with _writing(path):
        # Not tempfile, which makes files 0600: what is written here follows the umask like any output.
        _create(temporary, parts, 0o666)
        try:
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _unwritable(path: Path) -> str | None:
    if path.is_dir():
        return "a folder"
    try:
        # Permissions alone do not tell: a file system may be read-only or full.
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return f"folder {path.parent}: {error.strerror}"


def _open(path: str, flags: int) -> int:
    # O_NONBLOCK: a named pipe must not block the open.
    return os.open(path, flags | os.O_NONBLOCK)


def _create(path: Path, parts: Iterable[bytes], mode: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(fd)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except FileExistsError as error:
        raise OutputError(f"{path} is there already", remedy="choose another name, or remove it") from error
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be written: {_reason(error)}"
        raise OutputError(problem, remedy="choose a path in a folder that is there and writable") from error


def _reason(error: OSError | ValueError) -> object:
    return error.strerror if isinstance(error, OSError) else error
