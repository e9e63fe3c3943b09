"""``aotpack lock``: write down which packages a project uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.places import offline_option
from aotpack.cli.text import columns
from aotpack.errors import InputError, IntegrityError
from aotpack.lockfile import NAME, Locked, Lockfile
from aotpack.store import Store, is_url, open_package
from aotpack.store.urls import shown

__all__ = ["lock"]


@click.command()
@click.argument("sources", metavar="[NAME=]PLACE...", nargs=-1)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=NAME,
    show_default=True,
    help="The lock; what it has under other names stays.",
)
@offline_option
@click.option("--check", is_flag=True, help="Write nothing; exit 4 where a package is not what is locked.")
@talking
def lock(console: Console, sources: tuple[str, ...], output: Path, offline: bool, check: bool) -> None:
    """Write the digests of packages into aotpack.lock, which load then insists on.

    A PLACE is a file or a URL; several under one NAME are replicas of one package. Without any, every package
    of the lock is looked up again.
    """
    before = Lockfile.read(output) if output.exists() else Lockfile(path=output.absolute(), packages={})
    wanted = _wanted(sources) or {name: before.sources(name) or [] for name in before.packages}
    if not wanted:
        raise InputError("nothing to lock", expected="a package file or URL")
    found = {name: _look_up(places, before.path.parent, offline) for name, places in wanted.items()}
    if check:
        for name, locked in found.items():
            known = before.packages.get(name)
            if known is None or known.digest != locked.digest:
                raise IntegrityError(
                    f"{name} is not what {output} locks",
                    expected=known.digest if known else "no such name",
                    found=locked.digest,
                    remedy="if the new package is right, run 'aotpack lock' and commit the lock",
                )
        after = before
    else:
        after = Lockfile(path=before.path, packages={**before.packages, **found})
        after.write()
    rows = [[name, locked.digest, ", ".join(locked.targets)] for name, locked in found.items()]
    data = {"path": str(output), "written": not check, "packages": after.to_dict()["packages"]}
    console.show("aotpack.lock/1", data, columns(rows, ["name", "digest", "targets"]))


def _wanted(sources: Sequence[str]) -> dict[str, list[str]]:
    wanted: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        name, equals, place = source.partition("=")
        if not equals or "/" in name:
            place = source
            name = Path(place.partition("?")[0]).name.removesuffix(".aotpack")
        wanted[name].append(place)
    return dict(wanted)


def _look_up(places: Sequence[str], home: Path, offline: bool) -> Locked:
    with open_package(list(places), Store(), offline=offline or None) as package:
        return Locked(
            digest=package.digest,
            targets=package.manifest.targets,
            sources=tuple(_written(place, home) for place in places),
        )


def _written(place: str, home: Path) -> str:
    """As it is written into a lock in ``home``: no secrets, and files near it by relative paths."""
    if is_url(place):
        return shown(place)
    path = Path(place).absolute()
    return str(path.relative_to(home)) if path.is_relative_to(home) else str(path)
