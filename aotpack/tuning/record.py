"""A tuning record: what was measured on one chip, and the kernel options that were chosen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from aotpack.errors import InputError, IntegrityError
from aotpack.fields import Document, Fields, Form
from aotpack.files import read_file, replace_file
from aotpack.spec import DTYPES, AttentionSpec
from aotpack.targets import Target
from aotpack.tuning.options import CLASSES, DIRECTIONS, KERNELS, Options, unfit

__all__ = ["SCHEMA", "Attention", "Chip", "Entry", "Measured", "Record", "Timed", "one_of", "read_options"]

SCHEMA: Final = "aotpack.tuning/1"
_LIMIT: Final = 16 << 20
_SIZE: Final = (1, 1 << 31)
_WORDS: Final = Form(r"[ -~]{1,400}", "up to 400 printable ASCII characters")
_NAME: Final = Form(r"[A-Za-z0-9_.+-]{1,80}", "a name of letters, digits and _ . + -")
_CAPABILITY: Final = Form(r"[1-9][0-9]?\.[0-9]", "a compute capability such as 9.0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """What was measured on.

    Attributes:
        name: as the driver reports it, ``"NVIDIA H200"``.
        capability: compute capability, ``(9, 0)``; None for a CPU.
        multiprocessors: of the chip; cores of a CPU.
    """

    name: str
    capability: tuple[int, int] | None
    multiprocessors: int

    def __str__(self) -> str:
        return (
            self.name if self.capability is None else f"{self.name} (sm{''.join(map(str, self.capability))})"
        )

    def suits(self, target: Target) -> bool:
        """Whether a target is for devices of this capability, and no other."""
        return self.capability is not None and self.capability == target.capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Which attentions an entry is for; what is None may be anything.

    Attributes:
        heads, kv_heads, head_dim, value_dim, dtype: as in a spec.
        mask: the mask's family and parameters, as JSON values.
        score: family of the score modification, ``"none"`` for none.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    dtype: str | None = None
    mask: Mapping[str, Any] | None = None
    score: str | None = None

    @classmethod
    def of(cls, spec: AttentionSpec) -> Attention:
        """A spec's own: all but the scale and what else no kernel's speed depends on."""
        return cls(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            dtype=spec.dtype,
            mask=spec.to_dict()["mask"],
            score="none" if spec.score is None else spec.score.family,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what may be anything is left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def covers(self, spec: AttentionSpec) -> bool:
        """Whether a spec is one of these."""
        own = Attention.of(spec).to_dict()
        return all(own[name] == value for name, value in self.to_dict().items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds of one call at one batch, query and key length: median and quartiles of ``count`` turns."""

    lengths: tuple[int, int, int]
    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One candidate.

    Attributes:
        options: that it was compiled with.
        ok: whether it may be chosen.
        why: not.
        error: the largest relative error of its results against dense fp64 math, where they were compared.
        timings: at each lengths.
    """

    options: Options
    ok: bool = True
    why: str | None = None
    error: float | None = None
    timings: tuple[Timed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was chosen for one kind of attention, direction and length class.

    Attributes:
        attention: what it is for.
        kernels: ``"template"``, ``"dflash"`` or ``"cpu"``.
        direction: ``"forward"`` or ``"backward"``.
        length_class: one of ``CLASSES``.
        options: of the kernels; the others are their own.
        reason: why these, one sentence.
        candidates: all that were measured, in their order.
    """

    attention: Attention
    kernels: str
    direction: str
    length_class: str
    options: Options
    reason: str
    candidates: tuple[Measured, ...] = ()

    @property
    def key(self) -> str:
        """What no two entries of a record share."""
        return json.dumps(
            [self.kernels, self.length_class, self.direction, self.attention.to_dict()], sort_keys=True
        )


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
        return max(found, key=lambda entry: len(entry.attention.to_dict()), default=None)

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
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(
                f"{document.name} is not JSON", found=str(error), remedy=document.remedy
            ) from error
        return _record(Fields(plain, document=document))

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


def read_options(table: Fields, kernels: str, direction: str) -> Options:
    """The field ``options``, which the kernels must know."""
    options = table.plain("options")
    if problem := unfit(kernels, direction, options):
        table.wrong("options", f"options of {kernels} {direction}: {problem}")
    return {name: value for name, value in sorted(options.items()) if isinstance(value, int)}


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
