"""Checks of a spec's fields, and their values to and from JSON; each error names the field."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from aotpack.errors import SpecError

__all__ = ["finite", "flag", "known", "nested", "positive", "present", "text", "wrong"]


def wrong(field: str, expected: object, found: object, remedy: str | None = None) -> SpecError:
    """The error for one field."""
    return SpecError(f"spec field '{field}' is wrong", expected=expected, found=repr(found), remedy=remedy)


def positive(field: str, value: object) -> None:
    """Refuses all but a positive integer."""
    if type(value) is not int or value < 1:
        raise wrong(field, "a positive integer", value)


def finite(field: str, value: object) -> float:
    """A positive finite number as a float; refuses all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise wrong(field, "a positive finite number", value)
    return float(value)


def flag(field: str, value: object) -> None:
    """Refuses all but True and False."""
    if not isinstance(value, bool):
        raise wrong(field, "true or false", value)


def text(field: str, value: object, expected: str) -> None:
    """Refuses all but a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(field, expected, value)


def nested(field: str, value: object, kind: type) -> Any:
    """A tuple of ``kind`` from a list or tuple of them or of their dictionaries."""
    if not isinstance(value, list | tuple):
        raise wrong(field, f"a list of {kind.__name__} tables", value)
    make: Any = kind
    return tuple(make.from_dict(item) if isinstance(item, Mapping) else item for item in value)


def present(spec: Any) -> dict[str, Any]:
    """The fields that are not None, ready for JSON."""
    values = {f.name: getattr(spec, f.name) for f in fields(spec)}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value.to_dict() if hasattr(value, "to_dict") else value


def known(cls: Any, prefix: str, data: Mapping[str, Any], required: Collection[str]) -> dict[str, Any]:
    """The fields of a class, none unknown and none of ``required`` missing."""
    names = [f.name for f in fields(cls)]
    for key in data:
        if key not in names:
            raise wrong(
                f"{prefix}.{key}".lstrip("."), f"one of {', '.join(names)}", key, "remove or rename it"
            )
    for key in sorted(set(required) - data.keys()):
        raise wrong(f"{prefix}.{key}".lstrip("."), "a value", None, "add it")
    return dict(data)
