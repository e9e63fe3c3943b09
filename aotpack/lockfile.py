"""``aotpack.lock``: which packages a project uses, by digest, and where they are."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from aotpack.errors import InputError, IntegrityError
from aotpack.fields import Document, Fields, Form
from aotpack.files import replace_file

__all__ = ["NAME", "Locked", "Lockfile", "find_lockfile"]

NAME: Final = "aotpack.lock"
SCHEMA: Final = "aotpack.lock/1"
_LARGEST: Final = 1 << 22
_DIGEST: Final = Form(r"[0-9a-f]{64}", "a SHA-256 in hex")
_WORD: Final = Form(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", "letters, digits and _ . + -")
_SOURCE: Final = Form(r"[^\x00-\x1f\x7f]{1,2000}", "a path or URL")


@dataclass(frozen=True, kw_only=True, slots=True)
class Locked:
    """One package of a lock.

    Attributes:
        digest: of its manifest; no other package is taken under its name.
        targets: what it was built for, for people.
        sources: paths or URLs of its replicas, in the order in which they are tried; relative paths are
            relative to the lock.
    """

    digest: str
    targets: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lockfile:
    """A lock that was read or made.

    Attributes:
        path: of the file.
        packages: by name.
    """

    path: Path
    packages: Mapping[str, Locked]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """From a file.

        Raises:
            InputError: there is none, or it cannot be read.
            IntegrityError: it is no lock; the message has the field that is wrong.
        """
        where = Path(path)
        try:
            with where.open("rb") as file:
                data = json.loads(file.read(_LARGEST))
        except (OSError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "too deep"
            raise InputError(f"the lock {where} cannot be read: {reason}", remedy=_REMEDY) from error
        except ValueError as error:
            raise IntegrityError(
                f"the lock {where} is no JSON", found=error, remedy="run 'aotpack lock' again"
            ) from error
        return cls(path=where.absolute(), packages=_packages(data, where))

    def write(self) -> None:
        """To its file, all of it or nothing.

        Raises:
            InputError: a name, a digest or a source that no lock may have.
            OutputError: the path cannot be written.
        """
        try:
            _packages(self.to_dict(), self.path)
        except IntegrityError as error:
            raise InputError(error.problem, expected=error.expected, found=error.found) from error
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
        replace_file(self.path, text.encode())

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "schema": SCHEMA,
            "packages": {
                name: {
                    "digest": locked.digest,
                    "targets": list(locked.targets),
                    "sources": list(locked.sources),
                }
                for name, locked in self.packages.items()
            },
        }

    def sources(self, name: str) -> list[str] | None:
        """Where the package of a name is, with absolute paths; None for a name that is not locked."""
        locked = self.packages.get(name)
        if locked is None:
            return None
        return [s if "://" in s else str(self.path.parent / s) for s in locked.sources]

    def check(self, package: str, digest: str, name: str | None = None) -> None:
        """Refuses a package that is not locked.

        Args:
            package: where it is, for the message.
            digest: of its manifest.
            name: that it was asked for by, where the lock knows it; otherwise any locked digest will do.

        Raises:
            IntegrityError: another digest is locked.
        """
        wanted = self.packages if name is None else {name: self.packages[name]}
        if digest not in {locked.digest for locked in wanted.values()}:
            raise IntegrityError(
                f"{package} is not what {self.path} locks",
                expected=" or ".join(f"{n} {locked.digest}" for n, locked in wanted.items()) or "nothing",
                found=digest,
                remedy="if the new package is right, run 'aotpack lock' again and commit the lock",
            )


def find_lockfile(path: str | os.PathLike[str] | None = None) -> Lockfile | None:
    """The lock in force: the path given, else ``$AOTPACK_LOCK``, else ``aotpack.lock`` in this folder.

    Raises:
        InputError, IntegrityError: as in ``Lockfile.read``.
    """
    named = path or os.environ.get("AOTPACK_LOCK")
    if named:
        return Lockfile.read(named)
    return Lockfile.read(NAME) if Path(NAME).exists() else None


_REMEDY: Final = "check the path, or run 'aotpack lock'"


def _packages(data: object, path: Path) -> dict[str, Locked]:
    table = Fields(data, document=Document(f"lock {path}", "run 'aotpack lock' again"))
    table.text("schema", Form(SCHEMA, SCHEMA))
    packages = table.table("packages")
    locked = {name: _locked(packages.table(name)) for name in packages.keys(_WORD)}
    table.finish()
    return locked


def _locked(table: Fields) -> Locked:
    locked = Locked(
        digest=table.text("digest", _DIGEST),
        targets=table.texts("targets", _WORD),
        sources=table.texts("sources", _SOURCE),
    )
    if not locked.sources:
        table.wrong("sources", "at least one path or URL")
    table.finish()
    return locked
