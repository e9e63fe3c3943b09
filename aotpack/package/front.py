"""The front of a package file: magic, format version, manifest and the hash of the manifest."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from typing import Final

from aotpack.errors import IntegrityError
from aotpack.package.manifest import FORMAT_VERSION, Manifest, canonical_json
from aotpack.package.source import Source, read_exactly

__all__ = [
    "HEADER_SIZE",
    "MAGIC",
    "MAX_MANIFEST",
    "Front",
    "Header",
    "pack_front",
    "read_front",
    "read_header",
]

MAGIC: Final = b"\x89AOTPK\r\n"
MAX_MANIFEST: Final = 1 << 26
_HEADER: Final = struct.Struct("<8sHHI32s")
HEADER_SIZE: Final = _HEADER.size
_REMEDY: Final = "fetch or build the package again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The first 48 bytes: what they say of the rest is not checked yet.

    Attributes:
        version: of the format, major and minor.
        length: bytes of the manifest.
        digest: SHA-256 of the manifest's bytes, in hex.
    """

    version: tuple[int, int]
    length: int
    digest: str

    @property
    def front_size(self) -> int:
        """Bytes of the header and the manifest."""
        return _HEADER.size + self.length


@dataclass(frozen=True, kw_only=True, slots=True)
class Front:
    """The front as it was read.

    Attributes:
        manifest: with the index of blobs.
        digest: SHA-256 of the manifest's bytes, in hex.
        size: bytes before the first blob's frame.
    """

    manifest: Manifest
    digest: str
    size: int


def pack_front(manifest: Manifest) -> tuple[bytes, str]:
    """The bytes of the front, and the digest.

    Raises:
        ValueError: a manifest that JSON cannot hold, or that is too large.
    """
    body = canonical_json(manifest.to_dict())
    if len(body) > MAX_MANIFEST:
        raise ValueError(f"the manifest has {len(body)} bytes, more than {MAX_MANIFEST}")
    sha256 = hashlib.sha256(body)
    header = _HEADER.pack(MAGIC, *manifest.format_version, len(body), sha256.digest())
    return header + body, sha256.hexdigest()


def read_header(source: Source) -> Header:
    """Read the header alone.

    Raises:
        IntegrityError: not a package, or one of a format that this release of aotpack does not read.
    """
    header = read_exactly(source, 0, _HEADER.size, "its header") if source.size >= len(MAGIC) else b""
    if not header.startswith(MAGIC):
        raise IntegrityError(f"{source.name} is not an aotpack package", remedy="name an .aotpack file")
    _, major, minor, length, sha256 = _HEADER.unpack(header)
    _check_major(source, major, minor)
    if length > MAX_MANIFEST:
        raise _altered(source, "manifest", f"at most {MAX_MANIFEST} bytes", f"{length} bytes")
    return Header(version=(major, minor), length=length, digest=sha256.hex())


def read_front(source: Source) -> Front:
    """Read and check the front, and that the blobs fill the rest of the file without gap or overlap.

    Raises:
        IntegrityError: not a package, one that was truncated or altered, or one of a format that this
            release of aotpack does not read.
    """
    header = read_header(source)
    body = read_exactly(source, _HEADER.size, header.length, "its manifest")
    digest = hashlib.sha256(body).hexdigest()
    if digest != header.digest:
        raise _altered(source, "manifest", f"SHA-256 {header.digest}", f"SHA-256 {digest}")
    manifest = _parse(source, body)
    if manifest.format_version != header.version:
        stated, found = (".".join(map(str, version)) for version in (manifest.format_version, header.version))
        raise _altered(source, "header", f"format version {stated}", found)
    front = Front(manifest=manifest, digest=digest, size=header.front_size)
    _check_layout(source, front)
    return front


def _check_major(source: Source, major: int, minor: int) -> None:
    if major != FORMAT_VERSION[0]:
        # One damaged byte looks like this too, so it is an error of the bytes and not of the machine.
        raise IntegrityError(
            f"{source.name} has a package format that this aotpack does not read",
            expected=f"format {FORMAT_VERSION[0]}.x",
            found=f"format {major}.{minor}",
            remedy="install the aotpack release that wrote it, or fetch or build the package again",
        )


def _parse(source: Source, body: bytes) -> Manifest:
    try:
        data = json.loads(body)
        canonical = canonical_json(data) == body
    except (ValueError, RecursionError) as error:
        raise _altered(source, "manifest", "JSON", str(error)) from error
    if not canonical:
        raise _altered(source, "manifest", "canonical JSON", "JSON written another way")
    return Manifest.from_dict(data)


def _check_layout(source: Source, front: Front) -> None:
    end = 0
    for key, blob in sorted(front.manifest.blobs.items(), key=lambda item: item[1].offset):
        if blob.offset != end:
            raise _altered(source, f"offset of blob {key}", end, blob.offset)
        end += blob.size
    if source.size < front.size + end:
        problem = f"{source.name} is truncated"
        raise IntegrityError(
            problem, expected=f"{front.size + end} bytes", found=f"{source.size} bytes", remedy=_REMEDY
        )
    if source.size > front.size + end:
        raise _altered(source, "end", f"{front.size + end} bytes", f"{source.size} bytes")


def _altered(source: Source, part: str, expected: object, found: object) -> IntegrityError:
    problem = f"{source.name} was altered: its {part} is wrong"
    return IntegrityError(problem, expected=expected, found=found, remedy=_REMEDY)
