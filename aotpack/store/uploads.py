"""A package to a URL: verified first, and nothing half-done under the final name."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from aotpack.errors import AotpackError, HostError, InputError, IntegrityError, OutputError
from aotpack.package import Package
from aotpack.store.remote import PATIENCE, Patience, reason
from aotpack.store.replicas import reach
from aotpack.store.urls import connect, shown, sibling
from aotpack.trust.signature import SIGNATURE_SUFFIX, signature_path

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["Upload", "upload"]

Count = Callable[[int], None]
_SECONDS: Final = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """What an upload did.

    Attributes:
        digest: of the package.
        size: bytes of the package.
        targets: that it has variants for.
        written: False where the same package was there already.
        signed: whether a signature file went along.
    """

    digest: str
    size: int
    targets: tuple[str, ...]
    written: bool
    signed: bool


def upload(
    path: Path, url: str, *, force: bool = False, patience: Patience = PATIENCE, on_bytes: Count | None = None
) -> Upload:
    """Put a package and its signature file where a URL says; every byte is checked first.

    A file system that can rename gives the file its name when it is whole. An object store shows an object
    when it is whole anyway.

    Raises:
        InputError, IntegrityError: the file is not there, or not a sound package.
        OutputError: something else is at the URL, and ``force`` is not given.
        HostError: the URL cannot be reached or written.
    """
    with Package.open(path) as package:
        package.check_blobs()
        digest, size = package.digest, package.size
        targets = package.manifest.targets
    there = _found_at(url, patience)
    if there is not None and there[0] != digest and not force:
        raise OutputError(
            f"something else is at {shown(url)}",
            expected=f"nothing, or digest {digest}",
            found=f"digest {there[0]}" if there[0] else "a file that is not a package",
            remedy="choose another name, or replace it with --force",
        )
    written = there != (digest, size)
    if written:
        _put(path, url, on_bytes)
        if (arrived := _found_at(url, patience)) != (digest, size):
            raise IntegrityError(
                f"{shown(url)} does not hold what was written to it",
                expected=f"digest {digest}, {size} bytes",
                found="nothing" if arrived is None else f"digest {arrived[0]}, {arrived[1]} bytes",
                remedy="push it again with --force",
            )
    signed = signature_path(path).is_file()
    if signed:
        _put(signature_path(path), sibling(url, SIGNATURE_SUFFIX), None)
    return Upload(digest=digest, size=size, targets=targets, written=written, signed=signed)


def _found_at(url: str, patience: Patience) -> tuple[str, int] | None:
    """Digest and size of the package at a URL; no digest for what is none; None for nothing."""
    try:
        (replica,) = reach([url], patience)
    except InputError:
        return None
    except IntegrityError:
        return "", 0
    with contextlib.closing(replica.source) as source:
        return replica.header.digest, source.size


def _put(path: Path, url: str, on_bytes: Count | None) -> None:
    fs, target = connect(url, _SECONDS, retries=True)
    try:
        _write(fs, path, target, urlsplit(url).scheme, _counted(on_bytes))
        failure = None
    except AotpackError:
        raise
    except Exception as error:  # noqa: BLE001
        # Each backend raises what its own libraries raise.
        failure = HostError(
            f"{shown(url)} cannot be written",
            found=reason(error),
            remedy="check the URL, and whether the credentials of this process may write there",
        )
    if failure is not None:
        # Raised out here, because what was caught may quote the URL with its secrets.
        raise failure


def _write(fs: AbstractFileSystem, path: Path, target: str, protocol: str, options: dict[str, Any]) -> None:
    from fsspec import AbstractFileSystem

    if protocol in ("http", "https"):
        options["method"] = "put"
    # What a file system inherits here copies the bytes and deletes the first copy: no gain.
    if type(fs).mv is AbstractFileSystem.mv:
        fs.put_file(str(path), target, **options)
        return
    if fs.isdir(target):
        raise IsADirectoryError("it is a folder")
    folder = target.rpartition("/")[0]
    temporary = f"{folder}/.aotpack-{secrets.token_hex(8)}.tmp"
    fs.makedirs(folder, exist_ok=True)
    try:
        fs.put_file(str(path), temporary, **options)
        fs.mv(temporary, target)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.rm_file(temporary)
        raise


def _counted(on_bytes: Count | None) -> dict[str, Any]:
    from fsspec.callbacks import Callback

    if on_bytes is None:
        return {}
    seen = 0

    def count(size: int | None, value: int, **more: Any) -> None:
        nonlocal seen
        on_bytes(value - seen)
        seen = value

    return {"callback": Callback(hooks={"count": count})}
