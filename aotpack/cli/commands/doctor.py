"""``aotpack doctor``: this machine, and what a load or a build would miss."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from aotpack.cli.checks import Check, examine, facts
from aotpack.cli.console import Console, talking
from aotpack.cli.hostfile import write_host
from aotpack.cli.text import columns
from aotpack.errors import HostError

__all__ = ["doctor"]


@click.command()
@talking
def doctor(console: Console) -> int:
    """Check this machine, line by line, with the remedy for each problem.

    Exits 5 when a problem keeps packages from running here; one that only keeps this machine from
    building them does not count. 'aotpack explain --host' reads what --json prints.
    """
    checks = list(examine())
    blocked = [check for check in checks if not check.ok and check.needed_for == "load"]
    data = {
        "runs": not blocked,
        "builds": all(check.ok for check in checks),
        "checks": [{**asdict(check), "ok": check.ok} for check in checks],
        "host": _host(),
    }
    console.show("aotpack.doctor/1", data, _text(console, checks))
    if not blocked:
        return 0
    console.say(f"aotpack: packages cannot run here: {', '.join(check.name for check in blocked)}")
    return HostError.exit_code


def _host() -> dict[str, Any]:
    host = facts(whole=True)
    return {} if host is None else write_host(host)


def _text(console: Console, checks: list[Check]) -> str:
    rows = []
    for check in checks:
        mark = console.paint("ok", "green") if check.ok else console.paint("problem", "red")
        rows.append([mark, check.name, check.found])
        if check.remedy:
            scope = "" if check.needed_for == "load" else " (building only)"
            rows.append(["", f"  what to do{scope}", check.remedy])
    return columns(rows)
