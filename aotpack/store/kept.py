"""Parts of remote packages that a node keeps, by hash: fronts for good, frames until they are unpacked."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from aotpack.package.front import HEADER_SIZE
from aotpack.store.files import keep_file, open_regular, sweep_temporaries

__all__ = ["KeptParts", "frames_in", "fronts_in"]

_FORGOTTEN_SECONDS: Final = 7 * 86400.0


class KeptParts:
    """A folder of files that are named by the hash of their bytes; it is hashed when they are read.

    Args:
        folder: made when something is kept.
        skip: bytes at the start of each file that its name does not cover.
    """

    def __init__(self, folder: Path, *, skip: int = 0) -> None:
        self._folder = folder
        self._skip = skip

    def read(self, digest: str) -> bytes | None:
        """The bytes; None where they are not there or not right."""
        with contextlib.suppress(OSError), open_regular(self._folder / digest) as file:
            data = file.read()
            if hashlib.sha256(memoryview(data)[self._skip :]).hexdigest() == digest:
                return data
        return None

    def keep(self, digest: str, data: bytes) -> None:
        """Keep bytes; where the folder cannot be written, they are not kept."""
        keep_file(self._folder / digest, data)

    def remove(self, digests: Iterable[str]) -> None:
        """Delete parts, what killed processes left half-written, and what nobody came back for in a week."""
        with contextlib.suppress(OSError):
            for digest in digests:
                (self._folder / digest).unlink(missing_ok=True)
        sweep_temporaries(self._folder)
        long_ago = time.time() - _FORGOTTEN_SECONDS
        for path in self._folder.glob("*"):
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < long_ago:
                    path.unlink()


def fronts_in(root: Path) -> KeptParts:
    """The fronts that a store keeps, by the digest of their package."""
    return KeptParts(root / "fronts", skip=HEADER_SIZE)


def frames_in(root: Path) -> KeptParts:
    """The frames that a store keeps, by the SHA-256 of their bytes."""
    return KeptParts(root / "frames")
