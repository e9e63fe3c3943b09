"""``aotpack verify``: hash everything in a package. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.text import size
from aotpack.errors import IntegrityError
from aotpack.package import Package

__all__ = ["verify"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@talking
def verify(console: Console, file: Path) -> None:
    """Check the manifest and every blob of a package against their hashes."""
    with Package.open(file) as package:
        wrong = [error for key in package.manifest.blobs if (error := _wrong(package, key)) is not None]
        blobs = package.manifest.blobs
        raw = sum(blob.raw_size for blob in blobs.values())
        data = {"path": str(file), "digest": package.digest, "blobs": len(blobs), "raw_bytes": raw}
    if wrong:
        raise IntegrityError(
            f"{file} was altered: {len(wrong)} of its {len(blobs)} blobs are wrong",
            found="".join(f"\n    {error.problem}" for error in wrong),
            remedy="fetch or build the package again",
        )
    text = f"{file}: {len(blobs)} blobs, {size(raw)} unpacked, all as the manifest says"
    console.show("aotpack.verify/1", data, f"{text}\ndigest {data['digest']}")


def _wrong(package: Package, key: str) -> IntegrityError | None:
    try:
        package.read_blob(key)
    except IntegrityError as error:
        return error
    return None
