"""Small results that a node remembers in its store; losing one costs only time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aotpack.package.manifest import canonical_json
from aotpack.store.files import keep_file, open_regular

__all__ = ["Notes"]

_LARGEST: Final = 1 << 20


class Notes:
    """JSON objects of one kind by key, each a private file; made and read without a lock.

    Args:
        root: the store's folder.
        kind: a plain name, the name of the folder in it.
    """

    def __init__(self, root: Path, kind: str) -> None:
        self._folder = root / kind

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """What was remembered under exactly this key; None for nothing, or for what cannot be read."""
        try:
            with open_regular(self._path(key)) as file:
                found = json.loads(file.read(_LARGEST))
        except (OSError, ValueError, RecursionError):
            return None
        # The name is a hash of the key, so a file that lies about its key was put there by hand.
        if not isinstance(found, dict) or found.get("key") != json.loads(canonical_json(key)):
            return None
        note = found.get("note")
        return note if isinstance(note, dict) else None

    def put(self, key: Mapping[str, Any], note: Mapping[str, Any]) -> None:
        """Remember an object; where the folder cannot be written, it is not remembered."""
        keep_file(self._path(key), canonical_json({"key": key, "note": note}), mode=0o600)

    def _path(self, key: Mapping[str, Any]) -> Path:
        return self._folder / f"{hashlib.sha256(canonical_json(key)).hexdigest()}.json"
