"""A package behind a URL: ranges of it, over any file system that fsspec speaks to."""

from __future__ import annotations

import functools
import io
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar
from urllib.parse import urlsplit

from aotpack.errors import AotpackError, HostError, InputError
from aotpack.store.urls import connect, scrubbed, shown

__all__ = ["PATIENCE", "Patience", "RemoteSource", "read_beside", "reason"]

T = TypeVar("T")
_CREDENTIALS: Final = ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
_PASSED_AT_ONCE: Final = 1 << 20
_PASSING: Final = (408, 425, 429)


@dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long a remote is waited for.

    Attributes:
        timeout: seconds for one request over HTTP and S3; other protocols have limits of their own.
        attempts: how often a request is made that fails.
        wait: seconds before the second attempt; each later wait is twice the one before.
        piece: bytes of one request at most; what was read is not read again when a later piece fails.
    """

    timeout: float = 60.0
    attempts: int = 4
    wait: float = 0.5
    piece: int = 1 << 22


PATIENCE: Final = Patience()


class RemoteSource:
    """A file behind a URL. Bytes are read in ranges, as they are asked for.

    Where a server ignores ranges, each read takes the file from its start and drops what comes before.

    Args:
        url: with any protocol that fsspec knows.
        patience: how long to wait and try.
        on_bytes: called with the number of bytes of each piece that was read.

    Raises:
        InputError: there is no file at the URL.
        HostError: it cannot be reached or may not be read, or the package for its protocol is missing.
    """

    def __init__(
        self, url: str, *, patience: Patience = PATIENCE, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self._name = shown(url)
        self._patience = patience
        self._on_bytes = on_bytes
        self._ranges = True
        self._protocol = urlsplit(url).scheme
        self._fs, self._path = connect(url, patience.timeout)
        self._size = self._persist(self._measure)

    @property
    def name(self) -> str:
        """The URL without its secrets."""
        return self._name

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self._size

    def read_range(self, offset: int, size: int) -> bytes:
        """Bytes ``offset`` to ``offset + size``; fewer at the end of the file.

        Raises:
            InputError: the file is not there any more.
            HostError: every attempt failed.
        """
        end = min(offset + size, self._size)
        # A BytesIO gives its bytes away without a copy: a frame may be large.
        data = io.BytesIO()
        while offset < end:
            stop = min(end, offset + self._patience.piece)
            piece = self._persist(functools.partial(self._fetch, offset, stop))
            data.write(piece)
            offset += len(piece)
            if self._on_bytes is not None:
                self._on_bytes(len(piece))
        return data.getvalue()

    def close(self) -> None:
        """Nothing is held between two reads."""

    def _measure(self) -> int:
        facts = self._fs.info(self._path)
        if facts["type"] == "directory":
            raise InputError(f"{self._name} is a folder", remedy="name an .aotpack file in it")
        if facts["size"] is None:
            raise HostError(
                f"{self._name} cannot be read in ranges: its server does not say how long it is",
                remedy="download the file, or serve it another way",
            )
        return int(facts["size"])

    def _fetch(self, start: int, stop: int) -> bytes:
        if self._ranges:
            try:
                found = self._ranged(start, stop)
            except ValueError as error:
                if "range requests" not in str(error):
                    raise
                self._ranges = False
                warnings.warn(
                    f"the server of {self._name} ignores ranges: each read starts at the first byte",
                    stacklevel=2,
                )
        if not self._ranges:
            found = self._passing_over(start, stop - start)
        if not 0 < len(found) <= stop - start:
            raise OSError(f"{len(found)} bytes came where {stop - start} were asked for")
        return found

    def _ranged(self, start: int, stop: int) -> bytes:
        if self._protocol == "memory":
            # It gives all its readers one file object with one position.
            data: bytes = self._fs.cat_file(self._path, start=start, end=stop)
            return data
        with self._fs.open(
            self._path, "rb", block_size=self._patience.piece, cache_type="none", size=self._size
        ) as file:
            file.seek(start)
            piece: bytes = file.read(stop - start)
        return piece

    def _passing_over(self, skip: int, size: int) -> bytes:
        data = io.BytesIO()
        with self._fs.open(self._path, "rb", block_size=0) as stream:
            while skip > 0 and (passed := stream.read(min(skip, _PASSED_AT_ONCE))):
                skip -= len(passed)
            while data.tell() < size and (part := stream.read(size - data.tell())):
                data.write(part)
        return data.getvalue()

    def _persist(self, read: Callable[[], T]) -> T:
        """The result of a request, made again where another attempt may help."""
        attempt = 1
        while True:
            try:
                return read()
            except AotpackError:
                raise
            except Exception as error:  # noqa: BLE001
                # Each backend raises what its own libraries raise.
                cause = self._cause(error)
                last = attempt >= self._patience.attempts
                final = _final(self._name, cause) or (_given_up(self._name, cause, attempt) if last else None)
            if final is not None:
                # Raised out here, because what was caught may quote the URL with its secrets.
                raise final
            time.sleep(self._patience.wait * 2 ** (attempt - 1))
            attempt += 1

    def _cause(self, error: Exception) -> BaseException:
        # fsspec says of any failure to ask an HTTP server about a file that the file is not there.
        hidden = self._protocol in ("http", "https") and isinstance(error, FileNotFoundError)
        return (error.__cause__ if hidden else None) or error


def read_beside(url: str, limit: int, *, patience: Patience = PATIENCE) -> bytes | None:
    """A small file, at most ``limit + 1`` bytes of it; None where there is none.

    Raises:
        HostError: it cannot be reached or may not be read.
    """
    try:
        return RemoteSource(url, patience=patience).read_range(0, limit + 1)
    except InputError:
        return None


def _final(name: str, error: BaseException) -> AotpackError | None:
    """The error of a failure that another attempt will not mend; None where it may."""
    status = _status(error)
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        return InputError(f"there is no package at {name}", remedy="check the URL, or push the package to it")
    refused = isinstance(error, PermissionError) or type(error).__name__ in _CREDENTIALS
    if status in (401, 403) or refused:
        return HostError(
            f"{name} may not be read with the credentials of this process",
            found=reason(error),
            remedy="log in, or set the credentials of this service in the environment",
        )
    if isinstance(error, ImportError):
        return HostError(f"{name} needs a package: {reason(error)}", remedy="install it")
    if status is not None and 400 <= status < 500 and status not in _PASSING:
        return HostError(f"{name} cannot be read: {reason(error)}", remedy="check the URL and its server")
    return None


def _given_up(name: str, error: BaseException, attempts: int) -> HostError:
    return HostError(
        f"{name} cannot be read",
        found=f"{reason(error)}, {attempts} times",
        remedy="check the network and the server, and try again: what was fetched is not fetched again",
    )


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of aiohttp, httpx or requests, or in what caused it."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        for found in (getattr(each, "status", None), getattr(response, "status_code", None)):
            if isinstance(found, int):
                return found
    return None


def reason(error: BaseException) -> str:
    """What went wrong in a library, in a few words and without secrets."""
    status, phrase = _status(error), getattr(error, "message", "")
    if status is not None:
        return f"HTTP status {status} {phrase if isinstance(phrase, str) else ''}".rstrip()
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return scrubbed(str(error)).partition("\n")[0] or type(error).__name__
