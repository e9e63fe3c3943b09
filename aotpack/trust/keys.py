"""Ed25519 keys and their files."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from aotpack.errors import HostError, InputError
from aotpack.files import create_file, read_file

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = ["PrivateKey", "PublicKey", "generate_key_pair", "read_private_key"]

_MAX_KEY_FILE: Final = 1 << 14
# RFC 8410: an Ed25519 SubjectPublicKeyInfo is these 12 bytes, here in base64, and the 32 bytes of the key.
_SPKI: Final = "MCowBQYDK2VwAyEA"
_BEGIN, _END = "-----BEGIN PUBLIC KEY-----", "-----END PUBLIC KEY-----"
_PEM: Final = re.compile(rf"{_BEGIN}\r?\n{_SPKI}([A-Za-z0-9+/]{{42}}[AEIMQUYcgkosw048]=)\r?\n{_END}")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """An Ed25519 public key.

    Attributes:
        raw: its 32 bytes.
    """

    raw: bytes

    @classmethod
    def parse(cls, source: str | os.PathLike[str]) -> Self:
        """A key from PEM text, from 64 hex digits, or from a file that holds either.

        Raises:
            InputError: it is not a public key; the message does not repeat what it is.
        """
        if isinstance(source, str) and (key := cls._from_text(source)) is not None:
            return key
        if isinstance(source, str) and ("-----BEGIN" in source or "\n" in source):
            raise _not_public("the text", source)
        path = Path(source)
        data = read_file(path, _MAX_KEY_FILE)
        if data is None:
            raise InputError(f"there is no public key at {path}", remedy="check the path")
        text = data.decode("ascii", errors="replace")
        if (key := cls._from_text(text)) is None:
            raise _not_public(str(path), text)
        return key

    @property
    def key_id(self) -> str:
        """SHA-256 of the raw key, in hex."""
        return hashlib.sha256(self.raw).hexdigest()

    def to_pem(self) -> str:
        """The key as PEM SubjectPublicKeyInfo."""
        return f"{_BEGIN}\n{_SPKI}{base64.b64encode(self.raw).decode()}\n{_END}\n"

    def verifies(self, signature: bytes, message: bytes) -> bool:
        """Whether the owner of the key signed the message.

        Raises:
            HostError: the extra ``sign`` is not installed.
        """
        with _the_extra():
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        try:
            Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (InvalidSignature, ValueError):
            return False
        return True

    @classmethod
    def _from_text(cls, text: str) -> Self | None:
        text = text.strip()
        if re.fullmatch(r"[0-9a-fA-F]{64}", text):
            return cls(bytes.fromhex(text))
        found = _PEM.fullmatch(text)
        return cls(base64.b64decode(found[1])) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class PrivateKey:
    """An Ed25519 private key; printing it shows its public half only.

    Attributes:
        public: the public key.
    """

    public: PublicKey
    _secret: Ed25519PrivateKey = field(repr=False)

    def sign(self, message: bytes) -> bytes:
        """The signature, 64 bytes; the same message gives the same ones."""
        return self._secret.sign(message)


def generate_key_pair(path: str | os.PathLike[str], *, password: bytes | None = None) -> PublicKey:
    """Write a new private key (PEM PKCS8, permissions 600) to a path and its public key to ``path + ".pub"``.

    Args:
        path: of the private key.
        password: encrypts the private key.

    Raises:
        OutputError: a file is there, which is never overwritten, or a path cannot be written.
        InputError: a password that is too long.
        HostError: the extra ``sign`` is not installed.
    """
    private, public = Path(path), Path(f"{os.fspath(path)}.pub")
    with _the_extra():
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    secret = Ed25519PrivateKey.generate()
    key = PublicKey(secret.public_key().public_bytes_raw())
    try:
        data = secret.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption(),
        )
    except ValueError as error:
        raise InputError(f"the password cannot be used: {error}", remedy="choose another password") from error
    create_file(private, data, 0o600)
    try:
        create_file(public, key.to_pem().encode(), 0o666)
    except BaseException:
        # A private key whose public half was never handed out is of no use.
        private.unlink(missing_ok=True)
        raise
    return key


def read_private_key(path: str | os.PathLike[str], *, password: bytes | None = None) -> PrivateKey:
    """Read a private key.

    Args:
        path: of the PEM file.
        password: of an encrypted key; a key that is not encrypted needs none.

    Raises:
        InputError: no Ed25519 private key, one that other users can reach, or not its password.
        HostError: the extra ``sign`` is not installed.
    """
    with _the_extra():
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    path = Path(path)
    data = read_file(path, _MAX_KEY_FILE, private=True)
    if data is None:
        raise InputError(f"there is no private key at {path}", remedy="check the path, or run aotpack keygen")
    encrypted = b"BEGIN ENCRYPTED" in data
    if encrypted and not password:
        raise InputError(f"{path} is encrypted", remedy="set AOTPACK_KEY_PASSWORD to its password")
    try:
        secret = load_pem_private_key(data, password if encrypted else None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        remedy = "check AOTPACK_KEY_PASSWORD" if encrypted else "name a file that aotpack keygen wrote"
        raise InputError(f"{path} cannot be read as a private key", remedy=remedy) from error
    if not isinstance(secret, Ed25519PrivateKey):
        problem = f"{path} is not an Ed25519 private key"
        raise InputError(problem, remedy="name a file that aotpack keygen wrote")
    return PrivateKey(public=PublicKey(secret.public_key().public_bytes_raw()), _secret=secret)


def _not_public(name: str, text: str) -> InputError:
    # What is there may be a secret, and is not repeated.
    private = "PRIVATE KEY" in text
    return InputError(
        f"{name} is not an Ed25519 public key",
        expected="PEM as aotpack keygen writes it, or 64 hex digits",
        found="a private key" if private else None,
        remedy="name the public key, which ends in .pub" if private else "name a .pub file",
    )


@contextlib.contextmanager
def _the_extra() -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        problem = "signatures need the package cryptography, which cannot be imported"
        raise HostError(problem, found=error, remedy="pip install 'aotpack[sign]'") from error
