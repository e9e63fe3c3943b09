"""From records to the options of a build, and from a package back to the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from aotpack.errors import InputError
from aotpack.fields import Document, Fields, Form
from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning.entry import Entry
from aotpack.tuning.options import CLASSES, DIRECTIONS, Options
from aotpack.tuning.record import Record, one_of, read_options

__all__ = ["Choice", "Choices", "Frozen", "Records", "Tuning", "Used", "to_provenance", "used_records"]

_DIGEST: Final = Form(r"[0-9a-f]{64}", "a SHA-256 in 64 lowercase hex digits")
_WORDS: Final = Form(r"[ -~]{1,400}", "printable ASCII")
_PROVENANCE: Final = Document("package manifest's tuning", "build the package again")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Options of one program, the digest of the record that they are from, and its chip's name."""

    options: Options
    record: str
    chip: str


# By length class, then direction.
Choices = Mapping[str, Mapping[str, Choice]]


class Tuning(Protocol):
    """Where a build's kernel options come from."""

    def chosen(self, target: Target, spec: AttentionSpec, kernels: str) -> Choices:
        """Options of a spec's programs; what nothing is known of is left out."""
        ...

    def check(self, targets: Sequence[Target], specs: Mapping[str, AttentionSpec]) -> None:
        """Raises ``InputError`` where something was asked for that these targets or specs cannot use."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Records:
    """Tuning records.

    A record is used for targets of its own chip's compute capability and for no other.

    Attributes:
        given: by the user, by their files' names; they come first, in their order.
        shipped: with aotpack; of their entries, the one that says most is taken.
    """

    given: Mapping[str, Record] = field(default_factory=dict)
    shipped: Sequence[Record] = ()

    def chosen(self, target: Target, spec: AttentionSpec, kernels: str) -> Choices:
        """As ``Tuning`` says."""
        found = {
            each: {d: choice for d in DIRECTIONS if (choice := self._choice(target, spec, kernels, each, d))}
            for each in CLASSES[kernels]
        }
        return {each: choices for each, choices in found.items() if choices}

    def check(self, targets: Sequence[Target], specs: Mapping[str, AttentionSpec]) -> None:
        """Refuses a given record that is for another chip than the targets', or for other attentions."""
        for name, record in self.given.items():
            names = ", ".join(map(str, targets))
            if not any(record.chip.suits(target) for target in targets):
                raise InputError(
                    f"the tuning record {name} is of another chip than the build's targets",
                    expected=f"a record for {names}",
                    found=str(record.chip),
                    remedy="measure that chip with 'aotpack tune', or leave the record out",
                )
            if not any(entry.attention.covers(spec) for entry in record.entries for spec in specs.values()):
                raise InputError(
                    f"the tuning record {name} has nothing for these specs",
                    expected=f"an entry for {' or '.join(specs)}",
                    found=f"{len(record.entries)} entries for other attentions",
                    remedy="measure these specs with 'aotpack tune', or leave the record out",
                )

    def _choice(
        self, target: Target, spec: AttentionSpec, kernels: str, length_class: str, direction: str
    ) -> Choice | None:
        def found(record: Record) -> Entry | None:
            suits = record.chip.suits(target)
            return record.entry(spec, kernels, length_class, direction) if suits else None

        given = [(record, entry) for record in self.given.values() if (entry := found(record))]
        shipped = [(record, entry) for record in self.shipped if (entry := found(record))]
        # Which file a shipped entry is in means nothing; max takes the first of equals.
        best = max(shipped, key=lambda pair: pair[1].attention.detail, default=None)
        chosen = given[0] if given else best
        if chosen is None:
            return None
        record, entry = chosen
        return Choice(options=entry.options, record=record.digest, chip=record.chip.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """What an earlier build chose, by target and digest of the spec; no record is needed any more."""

    choices: Mapping[tuple[str, str], Choices]

    def chosen(self, target: Target, spec: AttentionSpec, kernels: str) -> Choices:
        """As ``Tuning`` says."""
        return self.choices.get((str(target), spec.digest), {})

    def check(self, targets: Sequence[Target], specs: Mapping[str, AttentionSpec]) -> None:
        """Nothing was asked for."""

    @classmethod
    def from_provenance(cls, data: object, kernels: Mapping[tuple[str, str], str]) -> Frozen:
        """Inverse of ``to_provenance``.

        Args:
            data: what it made.
            kernels: of each variant, by target and digest of the spec.

        Raises:
            IntegrityError: it is not; the field that is wrong is named.
        """
        table = Fields(data, "options.tuning", document=_PROVENANCE)
        records, choices = table.table("records"), table.table("options")
        chips = {digest: records.text(digest, _WORDS) for digest in records.keys(_DIGEST)}
        found = {}
        for target in choices.keys(_WORDS):
            specs = choices.table(target)
            for digest in specs.keys(_DIGEST):
                if (target, digest) not in kernels:
                    specs.wrong(digest, "a spec that has a variant for that target")
                found[target, digest] = _choices(specs.table(digest), kernels[target, digest], chips)
        table.finish()
        return cls(choices=found)


def to_provenance(chosen: Mapping[tuple[str, str], Choices]) -> dict[str, Any]:
    """All that a build chose, by target and digest of the spec, as JSON values for its manifest."""
    options: dict[str, dict[str, Any]] = {}
    for (target, digest), choices in chosen.items():
        if choices:
            options.setdefault(target, {})[digest] = {
                each: {d: {"record": c.record, "options": dict(c.options)} for d, c in directions.items()}
                for each, directions in choices.items()
            }
    records = {choice.record: choice.chip for choices in chosen.values() for choice in _each(choices)}
    return {"records": records, "options": options}


@dataclass(frozen=True, kw_only=True, slots=True)
class Used:
    """A record of which a build took something: for ``"cuda-sm90 forward div128"`` and the like."""

    digest: str
    chip: str
    programs: tuple[str, ...]


def used_records(data: object) -> list[Used]:
    """Which records a package's options came from, by what ``to_provenance`` made.

    Raises:
        IntegrityError: it did not; the field that is wrong is named.
    """
    table = Fields(data, "options.tuning", document=_PROVENANCE)
    records, options = table.table("records"), table.table("options")
    programs = [
        (directions.table(direction).text("record", _DIGEST), f"{target} {direction} {length_class}")
        for target in options.keys(_WORDS)
        for classes in [options.table(target).table(spec) for spec in options.table(target).keys(_DIGEST)]
        for length_class in classes.keys(_WORDS)
        for directions in [classes.table(length_class)]
        for direction in directions.keys(one_of(*DIRECTIONS))
    ]
    return [
        Used(
            digest=digest,
            chip=records.text(digest, _WORDS),
            programs=tuple(dict.fromkeys(text for record, text in programs if record == digest)),
        )
        for digest in records.keys(_DIGEST)
    ]


def _each(choices: Choices) -> Iterator[Choice]:
    return (choice for directions in choices.values() for choice in directions.values())


def _choices(table: Fields, kernels: str, chips: Mapping[str, str]) -> Choices:
    found = {}
    for length_class in table.keys(one_of(*CLASSES[kernels])):
        directions = table.table(length_class)
        found[length_class] = {
            direction: _choice(directions.table(direction), kernels, direction, chips)
            for direction in directions.keys(one_of(*DIRECTIONS))
        }
    return found


def _choice(table: Fields, kernels: str, direction: str, chips: Mapping[str, str]) -> Choice:
    digest = table.text("record", _DIGEST)
    if digest not in chips:
        table.wrong("record", "one of the records")
    choice = Choice(options=read_options(table, kernels, direction), record=digest, chip=chips[digest])
    table.finish()
    return choice
