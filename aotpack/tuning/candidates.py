"""A folder of candidate packages: what the GPU machine is given to measure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aotpack.errors import AotpackError, InputError
from aotpack.fields import Document, Fields, Form
from aotpack.files import read_file, replace_file
from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning.options import CLASSES, DIRECTIONS, KERNELS, Options
from aotpack.tuning.record import one_of, read_options

__all__ = ["INDEX", "Candidate", "CandidateSet", "Group", "Lengths"]

INDEX: Final = "candidates.json"
SCHEMA: Final = "aotpack.candidates/1"
_LIMIT: Final = 16 << 20
_WORDS: Final = Form(r"[ -~]{1,400}", "printable ASCII")
# A file of the folder itself: what is read is never elsewhere.
_FILE: Final = Form(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", "a file name of letters, digits and _ . + -")

# Batch, query length, key length.
Lengths = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One combination of options.

    Attributes:
        options: of the kernels.
        package: its file, in the folder; None where there is none.
        refused: why not, where there is none.
    """

    options: Options
    package: str | None = None
    refused: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Candidates for one spec, direction and length class, which are compared with each other.

    Attributes:
        name: of the spec, here and in the packages.
        spec: what was compiled.
        kernels: ``"template"``, ``"dflash"`` or ``"cpu"``.
        direction, length_class: as in a record's entry.
        lengths: at which they are measured.
        checked: further lengths, at which their results are checked.
        candidates: the untuned one first.
    """

    name: str
    spec: AttentionSpec
    kernels: str
    direction: str
    length_class: str
    lengths: tuple[Lengths, ...]
    checked: tuple[Lengths, ...]
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.direction} {self.length_class}"


@dataclass(frozen=True, kw_only=True, slots=True)
class CandidateSet:
    """All groups for one target, and the versions of what built them."""

    target: Target
    tools: Mapping[str, str]
    groups: tuple[Group, ...]

    def write(self, folder: Path) -> None:
        """Writes the folder's index; ``OutputError`` where it cannot be."""
        data = {
            "schema": SCHEMA,
            "target": str(self.target),
            "tools": dict(self.tools),
            "groups": [_group_dict(group) for group in self.groups],
        }
        replace_file(folder / INDEX, json.dumps(data, indent=1, sort_keys=True).encode("ascii") + b"\n")

    @classmethod
    def read(cls, folder: Path) -> CandidateSet:
        """From a folder.

        Raises:
            InputError: it holds no candidates.
            IntegrityError: its index is wrong; the field is named.
        """
        data = read_file(folder / INDEX, _LIMIT)
        remedy = "make it with 'aotpack build --tune --candidates FOLDER'"
        if data is None:
            raise InputError(f"{folder} holds no candidates", expected=f"a file {INDEX}", remedy=remedy)
        return _set(Document(str(folder / INDEX), remedy).read(data))


def _group_dict(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "spec": group.spec.to_dict(),
        "kernels": group.kernels,
        "direction": group.direction,
        "class": group.length_class,
        "lengths": [list(lengths) for lengths in group.lengths],
        "checked": [list(lengths) for lengths in group.checked],
        "candidates": [
            {"options": dict(each.options)}
            | ({"package": each.package} if each.package is not None else {"refused": each.refused})
            for each in group.candidates
        ],
    }


def _set(table: Fields) -> CandidateSet:
    table.text("schema", Form(SCHEMA, SCHEMA))
    tools = table.table("tools")
    found = CandidateSet(
        target=Target.parse(table.text("target", _WORDS)),
        tools={name: tools.text(name, _WORDS) for name in tools.keys(_WORDS)},
        groups=tuple(map(_group, table.tables("groups"))),
    )
    table.finish()
    return found


def _group(table: Fields) -> Group:
    kernels = table.text("kernels", one_of(*KERNELS))
    direction = table.text("direction", one_of(*DIRECTIONS))
    try:
        spec = AttentionSpec.from_dict(table.plain("spec"))
    except AotpackError as error:
        table.wrong("spec", f"a spec that this aotpack reads ({error.problem})")
    group = Group(
        name=table.text("name", _FILE),
        spec=spec,
        kernels=kernels,
        direction=direction,
        length_class=table.text("class", one_of(*CLASSES[kernels])),
        lengths=_lengths(table, "lengths"),
        checked=_lengths(table, "checked"),
        candidates=tuple(_candidate(each, kernels, direction) for each in table.tables("candidates")),
    )
    table.finish()
    return group


def _lengths(table: Fields, key: str) -> tuple[Lengths, ...]:
    found = table.value(key)
    known = [tuple(each) for each in found if isinstance(each, list)] if isinstance(found, list) else []
    if not known or not all(len(each) == 3 and all(type(n) is int and n > 0 for n in each) for each in known):
        table.wrong(key, "a list of batch, query and key lengths")
    return tuple((each[0], each[1], each[2]) for each in known)


def _candidate(table: Fields, kernels: str, direction: str) -> Candidate:
    candidate = Candidate(
        options=read_options(table, kernels, direction),
        package=table.optional_text("package", _FILE),
        refused=table.optional_text("refused", _WORDS),
    )
    if (candidate.package is None) == (candidate.refused is None):
        table.wrong("package", "a package, or why there is none")
    table.finish()
    return candidate
