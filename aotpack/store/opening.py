"""From a path, a URL or several replicas to an open package; offline from what the store remembers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

from aotpack.errors import HostError, InputError, IntegrityError, OfflineError
from aotpack.package import Package
from aotpack.package.front import Front, read_front
from aotpack.store.assembled import FrontSource, KeptSource
from aotpack.store.kept import frames_in, fronts_in
from aotpack.store.notes import Notes
from aotpack.store.remote import PATIENCE, Patience
from aotpack.store.replicas import Place, Replica, agreed_header, local_file, reach, sound_front
from aotpack.store.unpacked import Store
from aotpack.store.urls import is_url, shown

__all__ = ["Places", "is_offline", "open_package"]

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
    patience: Patience = PATIENCE,
    on_bytes: Callable[[int], None] | None = None,
) -> Iterator[Package]:
    """Open a package: its front is read and checked, frames are read on demand.

    Frames that come from a URL are kept in the store while the context is open, and after a failure. When it
    ends well, the caller has unpacked what it needs: then the URL is remembered, and the frames are not.

    Args:
        source: a file, a folder that holds one package, a URL, or a list of replicas of one package.
        store: where a remote package is remembered.
        offline: use no network; None asks ``AOTPACK_OFFLINE``. Paths are read as ever.
        patience: with remotes.
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
    urls = [str(place) for place in places if is_url(place)]
    with contextlib.ExitStack() as stack:
        if urls and is_offline(offline):
            paths = [place for place in places if not is_url(place)]
            opened = _from_paths(paths, store, stack) or _from_memory(urls, store)
        else:
            replicas = reach(places, patience, on_bytes)
            opened = _from_replicas(replicas, store, stack)
            urls = [str(replica.place) for replica in replicas if is_url(replica.place)]
        with Package(*opened) as package:
            yield package
        opened[0].forget_frames()
        _remember(urls, package, store)


def _from_replicas(
    replicas: Sequence[Replica], store: Store, stack: contextlib.ExitStack
) -> tuple[KeptSource, Front]:
    for replica in replicas:
        stack.callback(replica.source.close)
    header, first = agreed_header(replicas), replicas[0].source
    kept = _kept_front(header.digest, first.size, first.name, store)
    front, data = kept or sound_front(replicas, header)
    if kept is None:
        fronts_in(store.root).keep(front.digest, data)
    sources = [replica.source for replica in replicas]
    return KeptSource(first.name, front, data, sources, frames_in(store.root)), front


def _from_paths(
    paths: Sequence[Place], store: Store, stack: contextlib.ExitStack
) -> tuple[KeptSource, Front] | None:
    with contextlib.suppress(HostError, InputError):
        return _from_replicas(reach(paths, PATIENCE), store, stack) if paths else None
    return None


def _from_memory(urls: Sequence[str], store: Store) -> tuple[KeptSource, Front]:
    """What the store holds of the first URL that it remembers."""
    for url in urls:
        note = Notes(store.root, "urls").get({"url": shown(url)}) or {}
        match note.get("digest"), note.get("size"):
            case str(digest), int(size):
                kept = _kept_front(digest, size, shown(url), store)
                if kept is not None:
                    return KeptSource(shown(url), *kept, (), frames_in(store.root)), kept[0]
    raise OfflineError(
        f"aotpack is offline, and the store does not hold the index of {' or '.join(map(shown, urls))}",
        expected=f"what an earlier load or pull left in {store.root}",
        found="nothing of this package",
        remedy=f"run 'aotpack pull {shown(urls[0])}' while online",
    )


def _kept_front(digest: str, size: int, name: str, store: Store) -> tuple[Front, bytes] | None:
    data = fronts_in(store.root).read(digest)
    if data is None:
        return None
    try:
        front = read_front(FrontSource(data, name, size))
    except (IntegrityError, HostError):
        # Damaged, or the file is not as long as it should be: the one that is there is read, and judged.
        return None
    return (front, data) if front.digest == digest else None


def _remember(urls: Iterable[str], package: Package, store: Store) -> None:
    notes, note = Notes(store.root, "urls"), {"digest": package.digest, "size": package.size}
    for key in [{"url": shown(url)} for url in urls]:
        if notes.get(key) != note:
            notes.put(key, note)
