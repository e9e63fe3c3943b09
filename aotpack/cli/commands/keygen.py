"""``aotpack keygen``: a key pair to sign packages with. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.text import fields
from aotpack.trust import generate_key_pair

__all__ = ["keygen", "password"]


@click.command()
@click.option(
    "-o",
    "--output",
    metavar="NAME",
    type=click.Path(path_type=Path),
    default=Path("aotpack.key"),
    show_default=True,
    help="The private key; the public one is NAME.pub.",
)
@talking
def keygen(console: Console, output: Path) -> None:
    """Make a key pair to sign packages with.

    NAME stays with you, NAME.pub goes to whoever loads your packages. Where AOTPACK_KEY_PASSWORD is set, the
    private key is encrypted with it. No file is overwritten.
    """
    secret = password()
    key = generate_key_pair(output, password=secret)
    data = {
        "private_key": str(output),
        "public_key": f"{output}.pub",
        "key_id": key.key_id,
        "encrypted": secret is not None,
    }
    note = "encrypted" if secret else "not encrypted: keep it where only you can read it"
    rows = [
        ("private key", f"{output}, {note}"),
        ("public key", f"{output}.pub"),
        ("key id", key.key_id),
    ]
    console.show("aotpack.keygen/1", data, fields(rows))


def password() -> bytes | None:
    """The password of the private key, from AOTPACK_KEY_PASSWORD; an empty one is none."""
    return os.environb.get(b"AOTPACK_KEY_PASSWORD") or None
