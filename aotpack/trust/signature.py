"""The detached signature file of a package."""

from __future__ import annotations

import base64
import json
import os
import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aotpack.errors import InputError, IntegrityError
from aotpack.fields import Document, Fields, Form
from aotpack.files import read_file, replace_file
from aotpack.trust.keys import PrivateKey, PublicKey

__all__ = [
    "MAX_SIGNATURE_FILE",
    "SIGNATURE_SUFFIX",
    "Signature",
    "Signatures",
    "check_digest",
    "parse_signatures",
    "read_signatures",
    "sign",
    "signature_path",
]

MAX_SIGNATURE_FILE: Final = 1 << 16
SIGNATURE_SUFFIX: Final = ".sig"
_SCHEMA: Final = "aotpack.signatures/1"
_DIGEST: Final = Form(r"[0-9a-f]{64}", "a SHA-256 in 64 lowercase hex digits")
_KEY: Final = Form(r"[0-9a-f]{64}", "an Ed25519 public key in 64 lowercase hex digits")
_SIGNATURE: Final = Form(r"[A-Za-z0-9+/]{85}[AQgw]==", "64 bytes in base64")
_REMEDY: Final = "fetch it again, or delete it and sign the package again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One signature of a package. It says nothing about whom to trust: anybody can make a key and sign.

    Attributes:
        public_key: the key that is said to have signed.
        value: the Ed25519 signature, 64 bytes.
    """

    public_key: PublicKey
    value: bytes

    @property
    def key_id(self) -> str:
        """Id of the key, SHA-256 in hex."""
        return self.public_key.key_id

    def verifies(self, digest: str) -> bool:
        """Whether it is one of the package with this digest, by the key that it names.

        Raises:
            HostError: the extra ``sign`` is not installed.
        """
        return self.public_key.verifies(self.value, _message(digest))


@dataclass(frozen=True, kw_only=True, slots=True)
class Signatures:
    """A signature file, as it was read: nothing in it was verified yet.

    Attributes:
        digest: of the package that was signed.
        signatures: at least one, and no two by one key; sorted by key id where this module wrote them.
    """

    digest: str
    signatures: tuple[Signature, ...]

    def to_bytes(self) -> bytes:
        """The file's bytes.

        Raises:
            InputError: more signatures than a signature file holds.
        """
        rows = [
            {
                "key_id": signature.key_id,
                "public_key": signature.public_key.raw.hex(),
                "signature": base64.b64encode(signature.value).decode(),
            }
            for signature in self.signatures
        ]
        table = {"schema": _SCHEMA, "digest": self.digest, "signatures": rows}
        data = json.dumps(table, indent=2).encode() + b"\n"
        if len(data) > MAX_SIGNATURE_FILE:
            raise InputError(
                "a signature file cannot hold that many signatures",
                expected=f"at most {MAX_SIGNATURE_FILE} bytes",
                found=f"{len(data)} bytes",
                remedy="delete the file and sign with the keys that still matter",
            )
        return data


def signature_path(package: str | os.PathLike[str]) -> Path:
    """Where the signatures of a package file are: beside it, as those of a URL are behind URL + ``.sig``."""
    return Path(f"{os.fspath(package)}{SIGNATURE_SUFFIX}")


def read_signatures(package: str | os.PathLike[str]) -> Signatures | None:
    """The signatures beside a package file; None where it is not signed.

    Raises:
        IntegrityError: the signature file is not right.
        InputError: it cannot be read.
    """
    path = signature_path(package)
    data = read_file(path, MAX_SIGNATURE_FILE)
    return None if data is None else parse_signatures(data, str(path))


def sign(package: str | os.PathLike[str], digest: str, key: PrivateKey) -> Signatures:
    """Add a signature to those beside a package file; signing again with one key changes nothing.

    The file is replaced as a whole. Where two processes sign one package at once, the later one wins.

    Args:
        package: path of the package file.
        digest: of the package, which the caller has read and checked.
        key: signs.

    Raises:
        IntegrityError: the signature file there is not right, or is one of another package.
        InputError: the signature file cannot be read, or is full.
        OutputError: it cannot be written.
    """
    signature = Signature(public_key=key.public, value=key.sign(_message(digest)))
    path, before = signature_path(package), read_signatures(package)
    if before is not None and before.digest != digest:
        raise IntegrityError(
            f"{path} signs another package",
            expected=f"digest {digest}",
            found=f"digest {before.digest}",
            remedy="delete it if the package was built again, then sign",
        )
    others = () if before is None else before.signatures
    kept = [other for other in others if other.public_key != key.public]
    by_id = tuple(sorted([*kept, signature], key=lambda signature: signature.key_id))
    after = Signatures(digest=digest, signatures=by_id)
    if after != before:
        replace_file(path, after.to_bytes())
    return after


def parse_signatures(data: bytes, name: str) -> Signatures:
    """Signatures from the bytes of a signature file.

    Args:
        data: the whole file; a reader of a remote one fetches no more than ``MAX_SIGNATURE_FILE + 1`` bytes.
        name: where they are from, for messages.

    Raises:
        IntegrityError: not a signature file, or one that this release of aotpack does not read.
    """
    table = Fields(_load(data, name), document=Document(f"signature file {name}", _REMEDY))
    _check_schema(table, name)
    digest = table.text("digest", _DIGEST)
    signatures = tuple(_signature(row) for row in table.tables("signatures"))
    table.finish()
    keys = {signature.key_id for signature in signatures}
    if not keys or len(keys) != len(signatures):
        table.wrong("signatures", "one signature for each of at least one key")
    return Signatures(digest=digest, signatures=signatures)


def check_digest(digest: str) -> str:
    """The digest, where it is one; else ``InputError``."""
    if not _DIGEST.fits(digest):
        problem = "that is not the digest of a package"
        remedy = "take it from aotpack inspect or aotpack verify"
        raise InputError(problem, expected=_DIGEST.words, found=reprlib.repr(digest), remedy=remedy)
    return digest


def _message(digest: str) -> bytes:
    # The prefix keeps a signature made for anything else from counting here, and the other way round.
    return f"{_SCHEMA} sha256:{check_digest(digest)}".encode()


def _load(data: bytes, name: str) -> object:
    if len(data) > MAX_SIGNATURE_FILE:
        raise IntegrityError(
            f"{name} is not a signature file",
            expected=f"at most {MAX_SIGNATURE_FILE} bytes",
            found="more",
            remedy=_REMEDY,
        )
    try:
        return json.loads(data.decode("ascii"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        problem = f"{name} is not a signature file"
        raise IntegrityError(problem, expected="ASCII JSON", found=error, remedy=_REMEDY) from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"field {reprlib.repr(key)} twice")
        table[key] = value
    return table


def _check_schema(table: Fields, name: str) -> None:
    schema = table.text("schema", Form(r"aotpack\.signatures/[0-9]{1,9}", f'"{_SCHEMA}"'))
    if schema != _SCHEMA:
        raise IntegrityError(
            f"{name} has a signature format that this aotpack does not read",
            expected=_SCHEMA,
            found=schema,
            remedy="install the aotpack release that wrote it, or sign the package again",
        )


def _signature(row: Fields) -> Signature:
    key = PublicKey(bytes.fromhex(row.text("public_key", _KEY)))
    if row.text("key_id", _DIGEST) != key.key_id:
        row.wrong("key_id", f"the SHA-256 of its public key, {key.key_id}")
    value = base64.b64decode(row.text("signature", _SIGNATURE))
    row.finish()
    return Signature(public_key=key, value=value)
