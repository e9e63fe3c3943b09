"""Typed getters over one JSON object; every error carries the path of the field that is wrong."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from aotpack.errors import IntegrityError

__all__ = ["Fields", "Form"]


@dataclass(frozen=True, slots=True)
class Form:
    """What a string must look like, and the words for it."""

    pattern: str
    words: str

    def fits(self, value: object) -> bool:
        """Whether a value is a string of this form."""
        return isinstance(value, str) and re.fullmatch(self.pattern, value) is not None


class Fields:
    """One JSON object that is being read.

    Args:
        data: the object; anything but an object with string keys is an ``IntegrityError``.
        path: where it stands, for messages: ``"variants[0].requires"``.
        ignored: takes the paths of fields that nobody asked for; None makes such a field an error.
    """

    def __init__(self, data: object, path: str = "", ignored: list[str] | None = None) -> None:
        self._path, self._ignored, self._asked = path, ignored, set[str]()
        if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
            raise _error(path or "(the whole)", "an object", data)
        self._data: Mapping[str, object] = data

    def __contains__(self, key: str) -> bool:
        return key in self._data

    def wrong(self, key: str, expected: str) -> NoReturn:
        """Raise the ``IntegrityError`` for one of the fields."""
        raise _error(self._at(key), expected, self._data.get(key, _ABSENT))

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
        return tuple(_text(value, f"{self._at(key)}[{i}]", form) for i, value in enumerate(self._list(key)))

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
        return Fields(self.value(key), self._at(key), self._ignored)

    def plain(self, key: str) -> dict[str, object]:
        """An object whose fields are free."""
        return dict(self.table(key)._data)

    def tables(self, key: str) -> list[Fields]:
        """A list of objects."""
        return [Fields(v, f"{self._at(key)}[{i}]", self._ignored) for i, v in enumerate(self._list(key))]

    def keys(self, form: Form) -> list[str]:
        """The keys of an object whose keys are data, sorted."""
        for key in self._data:
            if not form.fits(key):
                raise _error(self._at(key), f"a key that is {form.words}", key)
        return sorted(self._data)

    def finish(self) -> None:
        """Deal with the fields that nobody asked for."""
        for key in sorted(self._data.keys() - self._asked):
            if self._ignored is None:
                raise _error(self._at(key), "no such field", self._data[key])
            self._ignored.append(self._at(key))

    def _at(self, key: str) -> str:
        return f"{self._path}.{key}".lstrip(".")

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


def _error(path: str, expected: str, found: object) -> IntegrityError:
    return IntegrityError(
        f"package manifest field '{path}' is wrong",
        expected=expected,
        found=_REPR.repr(found),
        remedy="fetch or build the package again",
    )


def _text(value: object, path: str, form: Form) -> str:
    if not isinstance(value, str) or not form.fits(value):
        raise _error(path, form.words, value)
    return value
