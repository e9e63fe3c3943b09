"""``aotpack cache``: the node's folder of unpacked variants."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.text import columns, size
from aotpack.errors import InputError, IntegrityError
from aotpack.store import Entry, Store

__all__ = ["cache"]

_UNITS = {"d": 86400, "h": 3600, "m": 60}


@click.group()
def cache() -> None:
    """Look after this node's folder of unpacked variants (AOTPACK_CACHE)."""


@cache.command("ls")
@talking
def list_(console: Console) -> None:
    """List what is unpacked, the one that was used last first."""
    store = Store()
    entries = _by_use(store)
    data = {
        "folder": str(store.root),
        "bytes": sum(entry.size for entry in entries),
        "variants": [{"digest": e.digest, "bytes": e.size, "used": _when(e)} for e in entries],
    }
    rows = [[entry.digest[:12], size(entry.size), _when(entry)] for entry in entries]
    table = columns(rows, ["variant", "size", "last used"]) if rows else "nothing is unpacked"
    console.show("aotpack.cache.ls/1", data, f"{store.root}\n{table}")


@cache.command()
@talking
def verify(console: Console) -> int:
    """Hash every unpacked file; exits 4 where one is missing or altered.

    The next load repairs it from the package.
    """
    store = Store()
    wrong = {entry.digest: store.verify(entry.digest) for entry in store.entries()}
    damaged = {digest: names for digest, names in wrong.items() if names}
    data = {"folder": str(store.root), "variants": len(wrong), "damaged": damaged}
    lines = [f"{digest[:12]}: {name}" for digest, names in damaged.items() for name in names]
    whole = f"{len(wrong)} unpacked, all whole" if not damaged else "\n".join(lines)
    console.show("aotpack.cache.verify/1", data, whole)
    if damaged:
        console.say(f"aotpack: {len(damaged)} of {len(wrong)} unpacked variants are damaged")
        console.say("  what to do: load the package again, which repairs them, or run 'aotpack cache gc'")
        return IntegrityError.exit_code
    return 0


@cache.command()
@click.option(
    "--keep",
    default="30d",
    show_default=True,
    metavar="COUNT|AGE",
    help="How many of the last used stay, or for how long: 3, 30d, 12h, 15m.",
)
@talking
def gc(console: Console, keep: str) -> None:
    """Delete what was not used lately: unpacked variants, indexes of remote packages, self-tests.

    A process that has a variant loaded keeps running.
    """
    store = Store()
    entries = _by_use(store)
    leaving, oldest = _leaving(entries, keep)
    for entry in leaving:
        store.remove(entry.digest)
    freed = sum(entry.size for entry in leaving) + store.forget(oldest)
    data = {"folder": str(store.root), "removed": [e.digest for e in leaving], "bytes": freed}
    text = f"removed {len(leaving)} of {len(entries)}, {size(freed)}"
    console.show("aotpack.cache.gc/1", {**data, "kept": len(entries) - len(leaving)}, text)


def _by_use(store: Store) -> list[Entry]:
    return sorted(store.entries(), key=lambda entry: entry.used, reverse=True)


def _leaving(entries: list[Entry], keep: str) -> tuple[list[Entry], float]:
    """What goes, and the time before which the rest was last used."""
    if keep.isdecimal():
        staying = entries[: int(keep)]
        return entries[int(keep) :], min((entry.used for entry in staying), default=time.time())
    found = re.fullmatch(r"(\d+)([dhm])", keep)
    if found is None:
        raise InputError("--keep is wrong", expected="a count or an age: 3, 30d, 12h, 15m", found=repr(keep))
    oldest = time.time() - int(found[1]) * _UNITS[found[2]]
    return [entry for entry in entries if entry.used < oldest], oldest


def _when(entry: Entry) -> str:
    return datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds")
