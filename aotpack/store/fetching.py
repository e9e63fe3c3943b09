"""A package behind URLs, or in several places: what is remembered of it, and what has to be fetched."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from aotpack.errors import HostError, InputError, IntegrityError, OfflineError
from aotpack.package import Package
from aotpack.package.front import Front, read_front
from aotpack.store.assembled import FrontSource, KeptSource
from aotpack.store.kept import frames_in, fronts_in
from aotpack.store.notes import Notes
from aotpack.store.opening import Place
from aotpack.store.remote import PATIENCE, Patience
from aotpack.store.replicas import Replica, agreed_header, reach, sound_front
from aotpack.store.unpacked import Store
from aotpack.store.urls import is_url, shown

__all__ = ["fetched", "kept_package"]


@contextlib.contextmanager
def fetched(
    places: Sequence[Place],
    store: Store,
    *,
    offline: bool,
    patience: Patience | None,
    on_bytes: Callable[[int], None] | None,
) -> Iterator[Package]:
    """The package of these places, as ``open_package`` has it; offline from what the store remembers."""
    urls = [str(place) for place in places if is_url(place)]
    with contextlib.ExitStack() as stack:
        if offline:
            paths = [place for place in places if not is_url(place)]
            opened = _from_paths(paths, store, stack) or _from_memory(urls, store)
        else:
            replicas = reach(places, patience or PATIENCE, on_bytes)
            opened = _from_replicas(replicas, store, stack)
            urls = [str(replica.place) for replica in replicas if is_url(replica.place)]
        with Package(*opened) as package:
            yield package
        opened[0].forget_frames()
        _remember(urls, package, store)


@contextlib.contextmanager
def kept_package(digest: str, size: int, store: Store) -> Iterator[Package]:
    """The package with this digest as far as the store holds it, as ``open_kept`` has it."""
    name = f"the package {digest[:12]} in the store"
    kept = _kept_front(digest, size, name, store)
    if kept is None:
        raise OfflineError(
            f"the store does not hold the package {digest}",
            expected=f"its index and an unpacked variant in {store.root}",
            found="no index",
            remedy="load it once from where it is",
        )
    with Package(KeptSource(name, *kept, (), frames_in(store.root)), kept[0]) as package:
        yield package


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
