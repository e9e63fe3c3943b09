"""``aotpack sign``: vouch for a package. Needs no torch."""

from __future__ import annotations

from pathlib import Path

import click

from aotpack.cli.commands.keygen import password
from aotpack.cli.console import Console, talking
from aotpack.cli.text import fields
from aotpack.package import Package
from aotpack.trust import read_private_key, signature_path
from aotpack.trust import sign as add_signature

__all__ = ["sign"]


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--key",
    required=True,
    metavar="KEY",
    type=click.Path(path_type=Path),
    help="The private key that aotpack keygen made.",
)
@talking
def sign(console: Console, file: Path, key: Path) -> None:
    """Sign a package: every byte is checked, then FILE.sig is written beside it.

    Several keys may sign one package, one after the other. AOTPACK_KEY_PASSWORD opens an encrypted key.
    """
    secret = read_private_key(key, password=password())
    with Package.open(file) as package:
        package.check_blobs()
        digest = package.digest
    signed = add_signature(file, digest, secret)
    key_ids = [signature.key_id for signature in signed.signatures]
    data = {
        "path": str(file),
        "digest": digest,
        "signature_file": str(signature_path(file)),
        "key_id": secret.public.key_id,
        "signed_by": key_ids,
    }
    rows = [("signatures", str(signature_path(file))), ("digest", digest)]
    rows += [("signed by", key_id) for key_id in key_ids]
    console.show("aotpack.sign/1", data, fields(rows))
