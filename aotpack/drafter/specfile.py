"""TOML spec files: what a drafter's config does not say."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from aotpack.drafter.config import open_config, read_text
from aotpack.drafter.overrides import Overrides, named
from aotpack.drafter.reading import read_specs
from aotpack.errors import SpecError
from aotpack.own import check_places, importable, resolve
from aotpack.spec import AttentionSpec

__all__ = ["read_spec_file"]

_KEYS: Final = ("config", "mask", "score", "attention", "specs")


def read_spec_file(path: Path, stronger: Overrides) -> dict[str, AttentionSpec]:
    """The specs of a TOML spec file, in the form that ``aotpack.drafter`` documents.

    Args:
        path: the file; its ``config`` is relative to its folder, where rules of the user's own are looked
            for first, and then in the current folder.
        stronger: overrides that win over the file's own.

    Raises:
        SpecError: the file is missing or malformed, or holds an unknown key; or a rule of the user's own
            cannot be used.
    """
    origin = f"spec file '{path}'"
    data = _load(path, origin)
    for key in data:
        if key not in _KEYS:
            raise SpecError(
                f"{origin}: unknown key '{key}'",
                expected=f"one of {', '.join(_KEYS)}",
                found=key,
                remedy="remove or rename it",
            )
    if ("config" in data) == ("specs" in data):
        raise SpecError(
            f"{origin}: it says neither or both of 'config' and 'specs'",
            expected='config = "config.json", or tables [specs.NAME]',
            found=", ".join(data) or "an empty file",
        )
    with importable(path.parent, Path.cwd()):
        specs = _standalone(origin, data, stronger) if "specs" in data else _completed(path, data, stronger)
        for spec in specs.values():
            check_places(spec)
    return specs


def _completed(path: Path, data: Mapping[str, Any], stronger: Overrides) -> dict[str, AttentionSpec]:
    origin = f"spec file '{path}'"
    config = open_config(_config_path(path, origin, data["config"]))
    return read_specs(config, Overrides.from_tables(origin, data).under(stronger))


def _load(path: Path, origin: str) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, origin))
    except tomllib.TOMLDecodeError as error:
        raise SpecError(f"{origin} is not TOML", expected="a TOML spec file", found=str(error)) from error


def _config_path(path: Path, origin: str, value: Any) -> Path:
    if not isinstance(value, str) or not value or value.endswith(".toml"):
        raise SpecError(
            f"{origin}: 'config' is wrong",
            expected="the path of a config.json or its folder",
            found=repr(value),
        )
    return path.parent / value


def _standalone(origin: str, data: Mapping[str, Any], stronger: Overrides) -> dict[str, AttentionSpec]:
    if extra := [key for key in ("mask", "score", "attention") if key in data]:
        raise SpecError(
            f"{origin}: [{extra[0]}] belongs to a 'config'",
            expected="[specs.NAME] and [specs.NAME.mask] only",
            found=f"[{extra[0]}]",
            remedy="move its keys into each spec",
        )
    specs = data["specs"]
    if not isinstance(specs, Mapping) or not specs:
        raise SpecError(f"{origin}: 'specs' is wrong", expected="tables [specs.NAME]", found=repr(specs))
    return {name: _spec(f"{origin}: [specs.{name}]", table, stronger) for name, table in specs.items()}


def _spec(origin: str, table: Any, stronger: Overrides) -> AttentionSpec:
    if not isinstance(table, Mapping):
        raise SpecError(f"{origin} is wrong", expected="a table", found=repr(table))
    mask = named(table.get("mask"))
    if isinstance(mask, Mapping):
        mask = {**mask, **stronger.mask}
    try:
        return resolve(AttentionSpec.from_dict({**table, **stronger.attention, "mask": mask}))
    except SpecError as error:
        raise SpecError(
            f"{origin}: {error.problem}", expected=error.expected, found=error.found, remedy=error.remedy
        ) from error
