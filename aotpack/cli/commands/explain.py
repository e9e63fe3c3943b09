"""``aotpack explain``: what this machine would take of a package, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.hostfile import read_host
from aotpack.cli.places import offline_option, opened
from aotpack.cli.text import columns
from aotpack.errors import HostError, NoVariantError
from aotpack.package import Manifest, Variant
from aotpack.package.choosing import choose_variants, needed_names
from aotpack.targets import HostFacts, match

__all__ = ["explain"]

_COLORS = {"optimal": "green", "usable": "yellow", "refused": "red"}


@click.command()
@click.argument("file")
@offline_option
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--host",
    "host_file",
    type=click.Path(path_type=Path),
    help="Answer for another machine: what 'aotpack doctor --json' printed there.",
)
@talking
def explain(console: Console, file: str, offline: bool, device: str, host_file: Path | None) -> int:
    """Print every variant of a package with what this machine makes of it, and why.

    A variant is optimal (it is the one that load takes), usable, or refused. FILE may be a URL, of which the
    index alone is read. With --host, no torch is needed here.
    """
    with opened(file, offline) as package:
        manifest, digest = package.manifest, package.digest
    host = _facts(manifest, host_file)
    chosen: dict[str, Variant] = {}
    failure: NoVariantError | HostError | None = None
    try:
        chosen = choose_variants(manifest, host, device)
    except (NoVariantError, HostError) as error:
        failure = error
    rows = [row for variant in manifest.variants for row in _rows(manifest, variant, chosen, host, device)]
    data = {
        "path": package.name,
        "digest": digest,
        "device": device,
        "runs": failure is None,
        "variants": rows,
    }
    console.show("aotpack.explain/1", data, _text(console, rows))
    if failure is None:
        return 0
    console.say(f"aotpack: {failure.problem}")
    if failure.remedy:
        console.say(f"  what to do: {failure.remedy}")
    return failure.exit_code


def _facts(manifest: Manifest, host_file: Path | None) -> HostFacts:
    symbols, libraries = needed_names(manifest)
    if host_file is not None:
        return read_host(host_file, libraries)
    from aotpack.runtime.host import host_facts

    return host_facts(symbols=symbols, libraries=libraries)


def _rows(
    manifest: Manifest, variant: Variant, chosen: dict[str, Variant], host: HostFacts, device: str
) -> list[dict[str, Any]]:
    decision = match(variant.requires, variant.target, host, device)
    taken = chosen.get(variant.spec) is variant
    status = "optimal" if taken else "usable" if decision.accepted else "refused"
    return [
        {
            "spec": name,
            "target": variant.target,
            "status": status,
            "code": str(decision.code),
            "reason": decision.reason,
        }
        for name, spec in manifest.specs.items()
        if spec.digest == variant.spec
    ]


def _text(console: Console, rows: list[dict[str, Any]]) -> str:
    cells = [
        [
            row["spec"],
            row["target"],
            console.paint(row["status"], _COLORS[row["status"]]),
            row["code"],
            row["reason"],
        ]
        for row in rows
    ]
    return columns(cells, ["spec", "target", "status", "code", "reason"])
