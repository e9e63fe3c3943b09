"""A whole package to a file: verified, continued after an interruption, and named when it is whole."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from aotpack.errors import HostError, InputError, IntegrityError, OutputError
from aotpack.files import replace_file
from aotpack.package import Blob, Package
from aotpack.package.front import Front, read_front
from aotpack.store.assembled import FrontSource, KeptSource
from aotpack.store.opening import Place
from aotpack.store.remote import PATIENCE, Patience, read_beside
from aotpack.store.replicas import Replica, reach, sound_front
from aotpack.store.urls import is_url, sibling
from aotpack.trust.signature import MAX_SIGNATURE_FILE, SIGNATURE_SUFFIX, signature_path

__all__ = ["Download", "download"]

Count = Callable[[int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Download:
    """What a download left.

    Attributes:
        digest: of the package.
        size: bytes of the package.
        targets: that it has variants for.
        signed: whether a signature file came along.
    """

    digest: str
    size: int
    targets: tuple[str, ...]
    signed: bool


def download(
    place: Place, path: Path, *, patience: Patience = PATIENCE, on_bytes: Count | None = None
) -> Download:
    """Fetch a package as a whole, and its signature file where there is one.

    What came before an interruption is in ``PATH.part``, which the next download of this package continues.

    Raises:
        InputError, HostError: the package is not there, or cannot be read.
        IntegrityError: what is there is not a sound package.
        OutputError: the path cannot be written, or another process is downloading to it.
    """
    (replica,) = reach([place], patience, on_bytes)
    with contextlib.closing(replica.source):
        if not _is_whole(path, replica):
            _fetch(replica, path)
    signature = None
    if is_url(place):
        beside = sibling(str(place), SIGNATURE_SUFFIX)
        signature = read_beside(beside, MAX_SIGNATURE_FILE, patience=patience)
    if signature is not None:
        replace_file(signature_path(path), signature)
    with Package.open(path) as package:
        targets = package.manifest.targets
        signed = signature is not None
        return Download(digest=package.digest, size=package.size, targets=targets, signed=signed)


def _is_whole(path: Path, replica: Replica) -> bool:
    with contextlib.suppress(InputError, IntegrityError, HostError), Package.open(path) as package:
        package.check_frames(package.manifest.blobs)
        return package.digest == replica.header.digest
    return False


def _fetch(replica: Replica, path: Path) -> None:
    part = path.with_name(f"{path.name}.part")
    with _writing(path), _locked(part) as file:
        front, data = _front(replica, file)
        missing = _after_what_is_there(file, front)
        source = KeptSource(replica.source.name, front, data, [replica.source], None)
        for blob in missing:
            file.write(_frame(source, front, blob))
        file.flush()
        os.fsync(file.fileno())
        part.replace(path)


def _front(replica: Replica, file: BufferedRandom) -> tuple[Front, bytes]:
    """The front in the file where it is that of the replica; else the replica's, put into the file."""
    data = file.read(replica.header.front_size)
    with contextlib.suppress(IntegrityError, HostError):
        front = read_front(FrontSource(data, replica.source.name, replica.source.size))
        if front.digest == replica.header.digest:
            return front, data
    front, data = sound_front([replica], replica.header)
    file.seek(0)
    file.truncate()
    file.write(data)
    return front, data


def _after_what_is_there(file: BufferedRandom, front: Front) -> list[Blob]:
    """The blobs that are missing behind the sound frames in a file, which is cut behind these."""
    blobs = sorted(front.manifest.blobs.values(), key=lambda blob: blob.offset)
    file.seek(front.size)
    for index, blob in enumerate(blobs):
        if hashlib.sha256(file.read(blob.size)).hexdigest() != blob.frame_sha256:
            file.seek(front.size + blob.offset)
            file.truncate()
            return blobs[index:]
    file.truncate()
    return []


def _frame(source: KeptSource, front: Front, blob: Blob) -> bytes:
    data = source.read_range(front.size + blob.offset, blob.size)
    if (found := hashlib.sha256(data).hexdigest()) != blob.frame_sha256:
        raise IntegrityError(
            f"{source.name} was altered: its frame at offset {blob.offset} is wrong",
            expected=f"SHA-256 {blob.frame_sha256}",
            found=f"SHA-256 {found}",
            remedy="push or build the package again",
        )
    return data


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[BufferedRandom]:
    """The file of a download that goes on or begins, for this process alone."""
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    with os.fdopen(fd, "r+b") as file:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The one who held it until now may have given it its final name.
            mine = part.exists() and os.path.samestat(part.stat(), os.fstat(fd))
        except BlockingIOError:
            mine = False
        if not mine:
            raise OutputError(
                f"another process is downloading to {part}", remedy="wait for it, then try again"
            )
        yield file


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise OutputError(problem, remedy="choose a path in a folder that is there and writable") from error
