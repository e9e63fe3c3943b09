"""The signature file beside a package, wherever the package is; offline, as it was seen last."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aotpack.errors import InputError
from aotpack.store.notes import Notes
from aotpack.store.opening import Places, is_offline
from aotpack.store.remote import PATIENCE, Patience, RemoteSource
from aotpack.store.replicas import Place, local_file
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
    notes, key = Notes(store.root, "signatures"), {"digest": digest}
    for place in places:
        if not is_url(place):
            found = read_signatures(local_file(Path(place)))
        elif silent:
            note = notes.get(key) or {}
            text = note.get("text")
            found = parse_signatures(text.encode(), shown(str(place))) if isinstance(text, str) else None
        elif (data := _fetched(sibling(str(place), SIGNATURE_SUFFIX), patience)) is not None:
            found = parse_signatures(data, shown(str(place)) + SIGNATURE_SUFFIX)
            notes.put(key, {"text": data.decode("ascii")})
        else:
            found = None
        if found is not None:
            return found
    return None


def _fetched(url: str, patience: Patience) -> bytes | None:
    """The file's bytes, one more than allowed at most; None where there is no such file."""
    try:
        remote = RemoteSource(url, patience=patience)
    except InputError:
        return None
    try:
        return remote.read_range(0, min(remote.size, MAX_SIGNATURE_FILE + 1))
    finally:
        remote.close()
