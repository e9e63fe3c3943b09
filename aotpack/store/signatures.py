"""The signature file beside a package, wherever the package is; offline, as it was seen last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aotpack.store.notes import Notes
from aotpack.store.opening import Place, Places, is_offline, local_file
from aotpack.store.remote import PATIENCE, Patience, read_beside
from aotpack.store.unpacked import Store
from aotpack.store.urls import is_url, shown, sibling
from aotpack.trust import (
    MAX_SIGNATURE_FILE,
    SIGNATURE_SUFFIX,
    Signatures,
    parse_signatures,
    read_signatures,
)

__all__ = ["signatures_of"]


def signatures_of(
    source: Places,
    digest: str,
    store: Store,
    *,
    offline: bool | None = None,
    patience: Patience = PATIENCE,
) -> Signatures | None:
    """The signatures of a package, of the first place that has a signature file; None where none has.

    Args:
        source: as given to ``open_package``.
        digest: of the package, under which the store remembers what came from a URL.
        store: the node's.
        offline: use no network; None asks ``AOTPACK_OFFLINE``.
        patience: with remotes.

    Raises:
        IntegrityError: a file that is no signature file.
        HostError: a URL cannot be reached.
    """
    places: Sequence[Place] = [source] if isinstance(source, str | os.PathLike) else list(source)
    silent = is_offline(offline)
    for place in places:
        if not is_url(place):
            found = _beside_path(Path(place))
        elif silent:
            found = _remembered(digest, str(place), store)
        else:
            found = _beside_url(str(place), digest, store, patience)
        if found is not None:
            return found
    return None


def _beside_path(path: Path) -> Signatures | None:
    # A replica that is not there has no signatures either.
    return read_signatures(local_file(path)) if path.exists() else None


def _beside_url(url: str, digest: str, store: Store, patience: Patience) -> Signatures | None:
    data = read_beside(sibling(url, SIGNATURE_SUFFIX), MAX_SIGNATURE_FILE, patience=patience)
    if data is None:
        return None
    found = parse_signatures(data, shown(url) + SIGNATURE_SUFFIX)
    _notes(store).put({"digest": digest}, {"text": data.decode("ascii")})
    return found


def _remembered(digest: str, url: str, store: Store) -> Signatures | None:
    text = (_notes(store).get({"digest": digest}) or {}).get("text")
    return parse_signatures(text.encode(), shown(url) + SIGNATURE_SUFFIX) if isinstance(text, str) else None


def _notes(store: Store) -> Notes:
    return Notes(store.root, "signatures")
