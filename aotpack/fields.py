"""Typed getters over one JSON object; every error carries the path of the field that is wrong."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from aotpack.errors import IntegrityError

__all__ = ["Document", "Fields", "Form"]


@dataclass(frozen=True, slots=True)
class Form:
    """What a string must look like, and the words for it."""

    pattern: str
    words: str

    def fits(self, value: object) -> bool:
        """Whether a value is a string of this form."""
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


@dataclass(frozen=True, slots=True)
class Document:
    """What is being read, for messages: its name, and what to do when it is wrong."""

    name: str
    remedy: str

    def read(self, data: bytes) -> Fields:
        """The object in its bytes; an ``IntegrityError`` where they are not JSON."""
        try:
            plain = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise IntegrityError(f"{self.name} is not JSON", found=str(error), remedy=self.remedy) from error
        return Fields(plain, document=self)


MANIFEST: Final = Document("package manifest", "fetch or build the package again")


class Fields:
    """One JSON object that is being read.

    Args:
        data: the object; anything but an object with string keys is an ``IntegrityError``.
        path: where it stands, for messages: ``"variants[0].requires"``.
        ignored: takes the paths of fields that nobody asked for; None makes such a field an error.
        document: that the object is in.
    """

    def __init__(
        self,
        data: object,
        path: str = "",
        ignored: list[str] | None = None,
        document: Document = MANIFEST,
    ) -> None:
        self._path, self._ignored, self._asked = path, ignored, set[str]()
        self._document = document
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise self._error(path or "(the whole)", "an object", data)
        self._data: Mapping[str, object] = data

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def wrong(self, key: str, expected: str) -> NoReturn:
        """Raise the ``IntegrityError`` for one of the fields."""
        raise self._error(self._at(key), expected, self._data.get(key, _ABSENT))

    def value(self, key: str) -> object:
        """A field as it is; absent is an error."""
        self._asked.add(key)
        if key not in self._data:
            self.wrong(key, "a value")
        return self._data[key]

    def text(self, key: str, form: Form) -> str:
        """A string of the given form."""
        value = self.value(key)
        if not isinstance(value, str) or not form.fits(value):
            self.wrong(key, form.words)
        return value

    def optional_text(self, key: str, form: Form) -> str | None:
        """A string of the given form, or None where the field is absent."""
        return self.text(key, form) if key in self._data else None

    def texts(self, key: str, form: Form) -> tuple[str, ...]:
        """A list of strings of the given form."""
        values = self._list(key)
        for i, value in enumerate(values):
            if not form.fits(value):
                raise self._error(f"{self._at(key)}[{i}]", form.words, value)
        return tuple(str(value) for value in values)

    def pairs(self, key: str, left: Form, right: Form) -> tuple[tuple[str, str], ...]:
        """An object of strings as pairs, in the order of its keys."""
        table = self.table(key)
        return tuple((name, table.text(name, right)) for name in table.keys(left))

    def integer(self, key: str, low: int, high: int) -> int:
        """An integer, ``low <= value <= high``."""
        value = self.value(key)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(key, f"an integer from {low} to {high}")
        return value

    def optional_integer(self, key: str, low: int, high: int) -> int | None:
        """An integer, or None where the field is absent."""
        return self.integer(key, low, high) if key in self._data else None

    def number(self, key: str) -> float:
        """A finite number that is not negative."""
        value = self.value(key)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
            self.wrong(key, "a finite number that is not negative")
        return float(value)

    def table(self, key: str) -> Fields:
        """An object."""
        return Fields(self.value(key), self._at(key), self._ignored, self._document)

    def plain(self, key: str) -> dict[str, object]:
        """An object whose fields are free."""
        return dict(self.table(key)._data)

    def tables(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [
            Fields(v, f"{self._at(key)}[{i}]", self._ignored, self._document)
            for i, v in enumerate(self._list(key))
        ]

    def keys(self, form: Form) -> list[str]:
        """The keys of an object whose keys are data, sorted."""
        for key in self._data:
            if not form.fits(key):
                raise self._error(self._at(key), f"a key that is {form.words}", key)
        return sorted(self._data)

    def finish(self) -> None:
        """Deal with the fields that nobody asked for."""
        for key in sorted(self._data.keys() - self._asked):
            if self._ignored is None:
                raise self._error(self._at(key), "no such field", self._data[key])
            self._ignored.append(self._at(key))

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}".lstrip(".")

    def _error(self, path: str, expected: str, found: object) -> IntegrityError:
        # What was read may hold control characters, and a message ends up on a terminal.
        shown = path.encode("unicode_escape").decode()
        return IntegrityError(
            f"{self._document.name} field '{shown}' is wrong",
            expected=expected,
            found=_REPR.repr(found),
            remedy=self._document.remedy,
        )

    def _list(self, key: str) -> list[object]:
        value = self.value(key)
        if not isinstance(value, (list, tuple)):
            self.wrong(key, "a list")
        return list(value)


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT: Final = _Absent()
_LARGEST: Final = math.nextafter(math.inf, 0)
_REPR: Final = reprlib.Repr()
_REPR.maxstring = 100
