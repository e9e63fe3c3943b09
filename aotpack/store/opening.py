"""From a path, a URL or several replicas to an open package."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aotpack.errors import InputError
from aotpack.package import Manifest, Package
from aotpack.store.unpacked import Store
from aotpack.store.urls import is_url

if TYPE_CHECKING:
    from aotpack.store.remote import Patience

__all__ = ["Place", "Places", "is_offline", "keep_front", "local_file", "open_kept", "open_package"]

Place = str | os.PathLike[str]
Places = Place | Sequence[Place]
_YES: Final = ("1", "true", "yes")
_NO: Final = ("", "0", "false", "no")


def is_offline(offline: bool | None = None) -> bool:
    """What was asked for, or else what ``AOTPACK_OFFLINE`` says.

    Raises:
        InputError: the variable says neither yes nor no.
    """
    if offline is not None:
        return offline
    said = os.environ.get("AOTPACK_OFFLINE", "").strip().lower()
    if said not in (*_YES, *_NO):
        raise InputError(
            "AOTPACK_OFFLINE is neither yes nor no",
            expected="1, true or yes; or 0, false, no or nothing",
            found=repr(said),
            remedy="set it to one of these, or unset it",
        )
    return said in _YES


@contextlib.contextmanager
def open_package(
    source: Places,
    store: Store,
    *,
    offline: bool | None = None,
    patience: Patience | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[Package]:
    """Open a package: its front is read and checked, frames are read on demand.

    Frames that come from a URL are kept in the store while the context is open, and after a failure. When it
    ends well, the caller has unpacked what it needs: then the URL is remembered, and the frames are not.

    Args:
        source: a file, a folder that holds one package, a URL, or a list of replicas of one package.
        store: where a remote package is remembered.
        offline: use no network; None asks ``AOTPACK_OFFLINE``. Paths are read as ever.
        patience: with remotes; None is ``PATIENCE``.
        on_bytes: called with the number of bytes of each piece that comes from a URL.

    Raises:
        InputError: there is no package in that place.
        HostError: it cannot be reached or read.
        IntegrityError: not a package, one that was altered, or replicas that differ.
        OfflineError: offline, and the store does not remember the URL.
    """
    places = [source] if isinstance(source, str | os.PathLike) else list(source)
    if not places:
        raise InputError("no package is named", expected="a path or a URL", found="an empty list")
    if len(places) == 1 and not is_url(places[0]):
        with Package.open(local_file(Path(places[0]))) as package:
            yield package
        return
    # Imported here: most loads are of one file.
    from aotpack.store.fetching import fetched

    silent = any(map(is_url, places)) and is_offline(offline)
    with fetched(places, store, offline=silent, patience=patience, on_bytes=on_bytes) as package:
        yield package


@contextlib.contextmanager
def open_kept(digest: str, size: int, store: Store) -> Iterator[Package]:
    """Open a package from the store alone: its index was kept, its variants were unpacked.

    Args:
        digest: of the package.
        size: of the package, in bytes.
        store: where they are looked for.

    Raises:
        OfflineError: the store has no index of this package.
    """
    from aotpack.store.fetching import kept_package

    with kept_package(digest, size, store) as package:
        yield package


def keep_front(manifest: Manifest, digest: str, store: Store) -> None:
    """Keep a package's index, so that ``open_kept`` finds it; where the store cannot be written, do not."""
    from aotpack.package.front import pack_front
    from aotpack.store.kept import fronts_in

    data, found = pack_front(manifest)
    # A manifest of a later minor version does not come back whole from the one that was read.
    if found == digest:
        fronts_in(store.root).keep(digest, data)


def local_file(path: Path) -> Path:
    """A file, or the only package in a folder.

    Raises:
        InputError: the folder does not hold exactly one.
    """
    if not path.is_dir():
        return path
    packages = sorted(path.glob("*.aotpack"))
    if len(packages) != 1:
        raise InputError(
            f"the folder {path} does not hold exactly one package",
            expected="one .aotpack file",
            found=", ".join(p.name for p in packages) or "none",
            remedy="name the file",
        )
    return packages[0]
