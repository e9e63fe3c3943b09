"""A package in several places, read as one source; what was fetched is kept in the store."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

from aotpack.errors import AotpackError, HostError, InputError, OfflineError
from aotpack.package import Source
from aotpack.package.front import Front
from aotpack.store.kept import KeptParts

__all__ = ["FrontSource", "KeptSource", "one_line"]


class FrontSource:
    """The first bytes of a package, as a source of them alone."""

    def __init__(self, data: bytes, name: str, size: int) -> None:
        self.name: str = name
        self.size: int = size
        self._data = data

    def read_range(self, offset: int, size: int) -> bytes:
        """Bytes ``offset`` to ``offset + size``, as far as they are held."""
        return self._data[offset : offset + size]

    def close(self) -> None:
        """Nothing is held open."""


class KeptSource:
    """The bytes of a package from its replicas; frames are kept in the store as they come.

    Without replicas it is what a store holds of the package, and all else raises OfflineError.

    Args:
        name: of the package, for messages.
        front: of the package.
        data: the bytes of the front.
        replicas: where the frames are.
        frames: where they are kept; None keeps none.
    """

    def __init__(
        self, name: str, front: Front, data: bytes, replicas: Sequence[Source], frames: KeptParts | None
    ) -> None:
        self.name: str = name
        self._front = front
        self._data = data
        self._replicas = list(replicas)
        self._frames = frames
        self._used: dict[str, None] = {}

    @property
    def size(self) -> int:
        """Bytes of the whole package."""
        return self._front.size + sum(blob.size for blob in self._front.manifest.blobs.values())

    def read_range(self, offset: int, size: int) -> bytes:
        """A frame, or a part of the front.

        Raises:
            HostError: no replica can be read.
            OfflineError: there is none, and the store does not hold the frame.
        """
        if offset + size <= self._front.size:
            return self._data[offset : offset + size]
        key, digest = self._frame(offset, size)
        kept = self._frames.read(digest) if self._frames else None
        self._used[digest] = None
        if kept is not None:
            return kept
        if not self._replicas:
            raise _not_kept(self.name, self._front, key)
        data = self._fetch(offset, size, digest)
        if self._frames and hashlib.sha256(data).hexdigest() == digest:
            self._frames.keep(digest, data)
        return data

    def close(self) -> None:
        """The replicas stay open: they belong to the caller."""

    def forget_frames(self) -> None:
        """Delete the kept frames that were read through here: the caller has unpacked them."""
        if self._frames:
            self._frames.remove(self._used)

    def _frame(self, offset: int, size: int) -> tuple[str, str]:
        for key, blob in self._front.manifest.blobs.items():
            if (self._front.size + blob.offset, blob.size) == (offset, size):
                return key, blob.frame_sha256
        raise ValueError(f"{size} bytes at {offset} are not a frame")

    def _fetch(self, offset: int, size: int, digest: str) -> bytes:
        """A frame from the first replica that has it right; else the wrong bytes, for the caller to judge."""
        data = b""
        # Each is asked again before it is given up: an answer may be wrong once.
        for replica in (*self._replicas, *self._replicas):
            if replica not in self._replicas:
                continue
            # Not held while the next is read: a frame may be large.
            data = b""
            try:
                data = replica.read_range(offset, size)
            except (InputError, HostError) as error:
                self._leave(replica, error)
                continue
            if hashlib.sha256(data).hexdigest() == digest:
                break
        return data

    def _leave(self, replica: Source, error: AotpackError) -> None:
        if len(self._replicas) == 1:
            raise error
        self._replicas.remove(replica)
        warnings.warn(f"aotpack reads from another replica: {one_line(error)}", stacklevel=2)


def one_line(error: AotpackError) -> str:
    """The problem and what was found, for a list or a warning."""
    return error.problem if error.found is None else f"{error.problem}: {error.found}"


def _not_kept(name: str, front: Front, key: str) -> OfflineError:
    manifest = front.manifest
    names = {spec.digest: name for name, spec in manifest.specs.items()}
    variants = [v for v in manifest.variants if key in v.blobs]
    return OfflineError(
        f"aotpack is offline, and the store does not hold what it needs of {name}",
        expected=" or ".join(f"the variant {v.target} of {names[v.spec]!r}" for v in variants),
        found="its index alone",
        remedy=f"run 'aotpack pull {name}' while online",
    )
