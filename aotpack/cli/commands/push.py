"""``aotpack push``: put a package where trainers load it from. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.text import size
from aotpack.cli.transfer import TransferProgress
from aotpack.errors import InputError
from aotpack.store.uploads import upload
from aotpack.store.urls import is_url, shown

__all__ = ["push"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("url")
@click.option("--force", is_flag=True, help="Replace another package that is there.")
@talking
def push(console: Console, file: Path, url: str, force: bool) -> None:
    """Check every byte of a package, then upload it and its signature file to a URL.

    The URL names the file: s3://bucket/drafter.aotpack, hf://owner/name/drafter.aotpack, https:// to a server
    that takes PUT, or any other protocol of fsspec.
    """
    if not is_url(url):
        raise InputError(
            f"{url} is not a URL", expected="s3://, hf://, https://, ...", remedy="copy files with cp"
        )
    with TransferProgress(console, file.stat().st_size if file.is_file() else 0) as progress:
        done = upload(file, url, force=force, on_bytes=progress)
    data = {
        "path": str(file),
        "url": shown(url),
        "digest": done.digest,
        "targets": list(done.targets),
        "bytes": done.size if done.written else 0,
        "already_there": not done.written,
        "signed": done.signed,
    }
    state = f"{size(done.size)} pushed to" if done.written else "already there:"
    signed = " with its signatures" if done.signed else ""
    console.show("aotpack.push/1", data, f"{state} {shown(url)}{signed}\ndigest {done.digest}")
