"""What the user names on the command line: sources of specs, and the file to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack.drafter import specs_from_config
from aotpack.errors import InputError
from aotpack.spec import AttentionSpec

__all__ = ["default_output", "read_sources"]


def read_sources(sources: Sequence[str], overrides: Mapping[str, Any]) -> dict[str, AttentionSpec]:
    """The specs of all sources by name.

    Raises:
        InputError: two sources have specs of one name.
        SpecError: a source cannot be read.
    """
    specs: dict[str, AttentionSpec] = {}
    origin: dict[str, str] = {}
    for source in sources:
        prefix, path = _split(source)
        for name, spec in specs_from_config(path, **overrides).items():
            full = f"{prefix}.{name}" if prefix else name
            if full in specs:
                raise _collision(full, origin[full], source)
            specs[full], origin[full] = spec, source
    return specs


def default_output(sources: Sequence[str]) -> Path:
    """A file in the current folder, named after the only source: its folder, or a spec file's own name.

    Raises:
        InputError: there are several sources.
    """
    if len(sources) > 1:
        raise InputError("several sources have no common name", remedy="name the package with -o FILE")
    path = _split(sources[0])[1].resolve()
    name = path.name if path.is_dir() else path.parent.name if path.name == "config.json" else path.stem
    return Path(f"{name or 'drafter'}.aotpack")


def _split(source: str) -> tuple[str, Path]:
    prefix, equals, path = source.partition("=")
    if not equals or "/" in prefix or Path(source).exists():
        return "", Path(source)
    return prefix, Path(path)


def _collision(name: str, first: str, second: str) -> InputError:
    return InputError(
        f"two sources have a spec that is named {name!r}",
        expected="one name for each spec of a package",
        found=f"{first} and {second}",
        remedy=f"rename them: a={_split(first)[1]} b={_split(second)[1]} makes a.{name} and b.{name}",
    )
