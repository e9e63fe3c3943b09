"""A tuning record: what was measured on one chip, and the kernel options that were chosen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from aotpack.errors import InputError
from aotpack.fields import Document, Fields, Form
from aotpack.files import read_file, replace_file
from aotpack.spec import DTYPES, AttentionSpec
from aotpack.tuning.entry import Attention, Chip, Entry, Measured, Timed
from aotpack.tuning.options import CLASSES, DIRECTIONS, KERNELS, Options, ordered, unfit

__all__ = ["SCHEMA", "Record", "one_of", "printable", "read_options"]

SCHEMA: Final = "aotpack.tuning/1"
_LIMIT: Final = 16 << 20
_SHORT: Final = 300
_SIZE: Final = (1, 1 << 31)
_WORDS: Final = Form(r"[ -~]{1,400}", "up to 400 printable ASCII characters")
_NAME: Final = Form(r"[A-Za-z0-9_.+-]{1,80}", "a name of letters, digits and _ . + -")
_CAPABILITY: Final = Form(r"[1-9][0-9]?\.[0-9]", "a compute capability such as 9.0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """All entries of one chip.

    Attributes:
        chip: that was measured.
        tools: versions that the candidates were built with, and ``runtime torch``.
        entries: at most one of each key.
    """

    chip: Chip
    tools: Mapping[str, str] = field(default_factory=dict)
    entries: tuple[Entry, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=lambda entry: entry.key)))

    @property
    def digest(self) -> str:
        """SHA-256 of the record as it is written."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def entry(self, spec: AttentionSpec, kernels: str, length_class: str, direction: str) -> Entry | None:
        """The entry for a spec; where several cover it, the one that says most."""
        wanted = (kernels, length_class, direction)
        found = [
            entry
            for entry in self.entries
            if (entry.kernels, entry.length_class, entry.direction) == wanted and entry.attention.covers(spec)
        ]
        return max(found, key=lambda entry: entry.attention.detail, default=None)

    def to_bytes(self) -> bytes:
        """The file: JSON with sorted keys and entries, the same bytes for the same record."""
        data = {
            "schema": SCHEMA,
            "chip": {**_present(self.chip), **_capability(self.chip)},
            "tools": dict(self.tools),
            "entries": [_entry_dict(entry) for entry in self.entries],
        }
        return json.dumps(data, indent=1, sort_keys=True, allow_nan=False).encode("ascii") + b"\n"

    def write(self, path: Path) -> None:
        """Puts the record where another may have been; ``OutputError`` where it cannot be written."""
        replace_file(path, self.to_bytes())

    @classmethod
    def from_bytes(cls, data: bytes, name: str) -> Record:
        """Inverse of ``to_bytes``.

        Raises:
            IntegrityError: it is no tuning record that this release reads; the field that is wrong is named.
        """
        document = Document(f"tuning record {name}", "measure it again with 'aotpack tune'")
        return _record(document.read(data))

    @classmethod
    def read(cls, path: Path) -> Record:
        """The record in a file.

        Raises:
            InputError: there is no such file, or it cannot be read.
            IntegrityError: as ``from_bytes``.
        """
        data = read_file(path, _LIMIT)
        if data is None or len(data) > _LIMIT:
            problem = "is too large for a tuning record" if data else "is not there"
            raise InputError(f"{path} {problem}", remedy="name a file that 'aotpack tune' wrote")
        return cls.from_bytes(data, path.name)


def one_of(*names: str) -> Form:
    """The form of a string that is one of these."""
    return Form("|".join(names), " or ".join(names))


def printable(text: str) -> str:
    """Of a text that came from elsewhere, what a record or index may hold of it."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:_SHORT]


def read_options(table: Fields, kernels: str, direction: str) -> Options:
    """The field ``options``, which the kernels must know."""
    options = table.plain("options")
    if problem := unfit(kernels, direction, options):
        table.wrong("options", f"options of {kernels} {direction}: {problem}")
    known = {name: value for name, value in options.items() if isinstance(value, int)}
    return ordered(kernels, direction, known)


def _present(value: Any) -> dict[str, Any]:
    values = {each.name: getattr(value, each.name) for each in fields(value)}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}


def _capability(chip: Chip) -> dict[str, str]:
    return {} if chip.capability is None else {"capability": ".".join(map(str, chip.capability))}


def _entry_dict(entry: Entry) -> dict[str, Any]:
    return {
        "attention": entry.attention.to_dict(),
        "kernels": entry.kernels,
        "direction": entry.direction,
        "class": entry.length_class,
        "options": dict(entry.options),
        "reason": entry.reason,
        "candidates": [_measured_dict(candidate) for candidate in entry.candidates],
    }


def _measured_dict(candidate: Measured) -> dict[str, Any]:
    timings = [_present(timed) for timed in candidate.timings]
    return {**_present(candidate), "options": dict(candidate.options), "timings": timings}


def _record(table: Fields) -> Record:
    table.text("schema", Form(SCHEMA, SCHEMA))
    tools, entries = table.table("tools"), table.tables("entries")
    record = Record(
        chip=_chip(table.table("chip")),
        tools={name: tools.text(name, _WORDS) for name in tools.keys(_WORDS)},
        entries=tuple(map(_entry, entries)),
    )
    if len({entry.key for entry in record.entries}) < len(entries):
        table.wrong("entries", "one entry for an attention, direction and length class")
    table.finish()
    return record


def _chip(table: Fields) -> Chip:
    text = table.optional_text("capability", _CAPABILITY)
    major, _, minor = (text or "").partition(".")
    chip = Chip(
        name=table.text("name", _WORDS),
        capability=(int(major), int(minor)) if text else None,
        multiprocessors=table.integer("multiprocessors", *_SIZE),
    )
    table.finish()
    return chip


def _entry(table: Fields) -> Entry:
    kernels = table.text("kernels", one_of(*KERNELS))
    direction = table.text("direction", one_of(*DIRECTIONS))
    entry = Entry(
        attention=_attention(table.table("attention")),
        kernels=kernels,
        direction=direction,
        length_class=table.text("class", one_of(*CLASSES[kernels])),
        options=read_options(table, kernels, direction),
        reason=table.text("reason", _WORDS),
        candidates=tuple(_measured(each, kernels, direction) for each in table.tables("candidates")),
    )
    chosen = [each for each in entry.candidates if each.options == entry.options and each.ok]
    if entry.candidates and not chosen:
        table.wrong("options", "those of a candidate that was right")
    table.finish()
    return entry


def _attention(table: Fields) -> Attention:
    sizes = {
        name: table.optional_integer(name, *_SIZE) for name in ("heads", "kv_heads", "head_dim", "value_dim")
    }
    attention = Attention(
        **sizes,
        dtype=table.optional_text("dtype", one_of(*DTYPES)),
        mask=table.plain("mask") if "mask" in table else None,
        score=table.optional_text("score", _WORDS),
    )
    table.finish()
    return attention


def _measured(table: Fields, kernels: str, direction: str) -> Measured:
    if not isinstance(ok := table.value("ok"), bool):
        table.wrong("ok", "true or false")
    candidate = Measured(
        options=read_options(table, kernels, direction),
        ok=ok,
        why=table.optional_text("why", _WORDS),
        error=table.number("error") if "error" in table else None,
        timings=tuple(map(_timed, table.tables("timings"))),
    )
    table.finish()
    return candidate


def _timed(table: Fields) -> Timed:
    lengths = table.value("lengths")
    if (
        not isinstance(lengths, list)
        or len(lengths) != 3
        or not all(type(n) is int and n > 0 for n in lengths)
    ):
        table.wrong("lengths", "batch, query and key length")
    timed = Timed(
        lengths=(lengths[0], lengths[1], lengths[2]),
        median=table.number("median"),
        low=table.number("low"),
        high=table.number("high"),
        count=table.integer("count", *_SIZE),
    )
    if not 0 < timed.low <= timed.median <= timed.high:
        table.wrong("median", "seconds above 0, between the quartiles")
    table.finish()
    return timed
