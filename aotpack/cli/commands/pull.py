"""``aotpack pull``: fetch what a machine needs of a package, or all of it, before it is offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.text import size
from aotpack.cli.transfer import TransferProgress
from aotpack.errors import HostError, NoVariantError, OfflineError
from aotpack.package import Package, Variant
from aotpack.store import Store, is_offline, is_url, open_package
from aotpack.store.downloads import download
from aotpack.store.signatures import signatures_of
from aotpack.store.urls import shown
from aotpack.targets import Target

__all__ = ["pull"]


@click.command()
@click.argument("url")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Download the whole package to a file.")
@click.option("--device", "devices", multiple=True, metavar="DEVICE", help="Fetch for cpu, cuda or cuda:N.")
@click.option("--target", "targets", multiple=True, metavar="TARGET", help="Fetch for a named target.")
@talking
def pull(
    console: Console, url: str, output: Path | None, devices: tuple[str, ...], targets: tuple[str, ...]
) -> None:
    """Fetch a package, so that it loads without a network from then on.

    Without -o the variants for this machine's CPU and GPU go into the cache folder, or those for the devices
    or targets that are named. With -o the package is downloaded as a file. An interrupted pull continues.
    """
    if output is not None and (devices or targets):
        raise click.UsageError("-o fetches the whole package: leave out --device and --target")
    with TransferProgress(console) as progress:
        data = (
            _to_store(url, devices, targets, progress) if output is None else _to_file(url, output, progress)
        )
    data = {"url": shown(url) if is_url(url) else url, **data, "bytes_read": progress.done}
    text = f"{', '.join(data['targets'])} in {data['path']}; {size(progress.done)} read"
    console.show("aotpack.pull/1", data, f"{text}\ndigest {data['digest']}")


def _to_file(url: str, output: Path, progress: TransferProgress) -> dict[str, Any]:
    if is_url(url) and is_offline():
        raise OfflineError("aotpack is offline (AOTPACK_OFFLINE)", remedy="unset AOTPACK_OFFLINE to pull")
    done = download(url, output, on_bytes=progress)
    return {"digest": done.digest, "targets": list(done.targets), "path": str(output), "signed": done.signed}


def _to_store(
    url: str, devices: Sequence[str], targets: Sequence[str], progress: TransferProgress
) -> dict[str, Any]:
    store = Store()
    with open_package(url, store, on_bytes=progress) as package:
        chosen = [v for name in targets for v in _for_target(package, str(Target.parse(name)))]
        if devices or not targets:
            chosen += _for_devices(package, devices)
        progress.total = progress.done + _bytes(package, chosen)
        for variant in chosen:
            store.unpack(package, variant)
        # Remembered too: a policy asks for the signatures when there may be no network any more.
        signed = signatures_of(url, package.digest, store) is not None
        names = list(dict.fromkeys(variant.target for variant in chosen))
        return {"digest": package.digest, "targets": names, "path": str(store.root), "signed": signed}


def _for_target(package: Package, target: str) -> list[Variant]:
    manifest = package.manifest
    found = [variant for variant in manifest.variants if variant.target == target]
    if len({variant.spec for variant in found}) < len({spec.digest for spec in manifest.specs.values()}):
        raise NoVariantError(
            f"{package.name} has no variant for {target}" + (" of every spec" if found else ""),
            expected=target,
            found=", ".join(manifest.targets),
            remedy="name a target that is there, or build the package for this one too",
        )
    return found


def _for_devices(package: Package, devices: Sequence[str]) -> list[Variant]:
    import torch

    from aotpack.runtime.loading import variants_here

    named = bool(devices)
    devices = devices or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    chosen: list[Variant] = []
    refusals: list[NoVariantError | HostError] = []
    for device in devices:
        try:
            chosen += variants_here(package.manifest, device).values()
        except (NoVariantError, HostError) as error:
            refusals.append(error)
    # A package for GPUs alone has nothing for the CPU, and that is right unless it was asked for.
    if refusals and (named or not chosen):
        raise refusals[0]
    return chosen


def _bytes(package: Package, variants: Sequence[Variant]) -> int:
    blobs = package.manifest.blobs
    keys = {key for variant in variants for key in variant.code}
    keys |= {dictionary for key in keys if (dictionary := blobs[key].dictionary) is not None}
    return sum(blobs[key].size for key in keys)
