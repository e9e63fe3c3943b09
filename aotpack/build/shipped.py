"""The tuning records that come with aotpack: ``aotpack/build/tuning``, of one chip a compute capability."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Final

from aotpack.tuning import Record, Records

__all__ = ["shipped", "shipped_records"]

_FOLDER: Final = Path(__file__).parent / "tuning"


@functools.cache
def shipped_records() -> tuple[Record, ...]:
    """All of them, in the order of their names."""
    return tuple(Record.read(path) for path in sorted(_FOLDER.glob("*.json")))


def shipped() -> Records:
    """What a build uses where no other tuning is given."""
    return Records(shipped=shipped_records())
