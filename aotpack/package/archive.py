"""Write a package file, and read the blobs of one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from aotpack.errors import InputError, IntegrityError
from aotpack.files import replace_file
from aotpack.package.frames import as_dictionary, blob_key, choose_dictionaries, compress, decompress
from aotpack.package.front import Front, pack_front, read_front
from aotpack.package.manifest import FORMAT_VERSION, MAX_BLOB, Blob, Manifest
from aotpack.package.source import FileSource, Source, read_exactly

if TYPE_CHECKING:
    from zstandard import ZstdCompressionDict

__all__ = ["Package", "write_package"]


class Package:
    """A package that is open for reading: the front was read and checked, blobs are read on demand.

    Thread-safe. A context manager that closes the source.

    Args:
        source: the bytes; ``Package.open`` takes a path.
        front: of this source, where it was read before.

    Raises:
        IntegrityError: not a package, one that was truncated or altered, or one of a format that this
            release of aotpack does not read.
    """

    def __init__(self, source: Source, front: Front | None = None) -> None:
        self._source = source
        self._front = read_front(source) if front is None else front
        self._dictionary: tuple[str, ZstdCompressionDict | None] = ("", None)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a package file.

        Raises:
            InputError: the path is not there, is not a file, or may not be read.
            IntegrityError: as for the class.
        """
        source = FileSource(path)
        try:
            return cls(source)
        except BaseException:
            source.close()
            raise

    @property
    def name(self) -> str:
        """Where the package is, for messages."""
        return self._source.name

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._source.size

    @property
    def manifest(self) -> Manifest:
        """What is in the package."""
        return self._front.manifest

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's bytes, in hex; it covers every byte of the file."""
        return self._front.digest

    @property
    def blob_sizes(self) -> dict[str, int]:
        """Bytes that each blob takes in the file, by key."""
        return {key: blob.size for key, blob in self.manifest.blobs.items()}

    def read_blob(self, key: str) -> bytes:
        """The raw bytes of a blob, checked against its key.

        Raises:
            KeyError: the package has no such blob.
            IntegrityError: the bytes are not what the manifest says.
        """
        blob = self.manifest.blobs[key]
        dictionary = None if blob.dictionary is None else self._read_dictionary(blob.dictionary)
        # Hashed before zstd sees it, so that the decoder is fed nothing that the manifest does not name.
        frame = self._read_frame(key, blob)
        try:
            raw = decompress(frame, blob.raw_size, dictionary)
        except ValueError as error:
            expected = f"a zstd frame of {blob.raw_size} bytes"
            raise self._altered(f"frame of blob {key}", expected, str(error)) from error
        self._check(f"blob {key}", key, raw)
        return raw

    def check_frames(self, keys: Iterable[str]) -> None:
        """Hash the compressed bytes of blobs, and of the dictionaries they need, without decompressing.

        Raises:
            KeyError: the package has no such blob.
            IntegrityError: the bytes are not what the manifest says.
        """
        blobs = self.manifest.blobs
        needed = dict.fromkeys(k for key in keys for k in (key, blobs[key].dictionary) if k is not None)
        for key in needed:
            self._read_frame(key, blobs[key])

    def check_blobs(self) -> None:
        """Read every blob; the ``IntegrityError`` names all that are wrong."""
        blobs = self.manifest.blobs
        wrong = [error for key in blobs if (error := self._wrong(key)) is not None]
        if wrong:
            raise IntegrityError(
                f"{self.name} was altered: {len(wrong)} of its {len(blobs)} blobs are wrong",
                found="".join(f"\n    {error.problem}" for error in wrong),
                remedy="fetch or build the package again",
            )

    def close(self) -> None:
        """Close the source."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wrong(self, key: str) -> IntegrityError | None:
        try:
            self.read_blob(key)
        except IntegrityError as error:
            return error
        return None

    def _read_frame(self, key: str, blob: Blob) -> bytes:
        frame = read_exactly(self._source, self._front.size + blob.offset, blob.size, f"blob {key}")
        self._check(f"frame of blob {key}", blob.frame_sha256, frame)
        return frame

    def _read_dictionary(self, key: str) -> ZstdCompressionDict | None:
        # The last one is kept: a variant's libraries share one. One assignment, so threads need no lock.
        known, dictionary = self._dictionary
        if known != key:
            dictionary = as_dictionary(self.read_blob(key))
            self._dictionary = (key, dictionary)
        return dictionary

    def _check(self, part: str, expected: str, data: bytes) -> None:
        if (found := hashlib.sha256(data).hexdigest()) != expected:
            raise self._altered(part, f"SHA-256 {expected}", f"SHA-256 {found}")

    def _altered(self, part: str, expected: str, found: str) -> IntegrityError:
        problem = f"{self.name} was altered: its {part} is wrong"
        return IntegrityError(
            problem, expected=expected, found=found, remedy="fetch or build the package again"
        )


def write_package(path: str | os.PathLike[str], manifest: Manifest, blobs: Mapping[str, bytes]) -> str:
    """Write a package file, all of it or nothing; the same input gives the same bytes.

    Args:
        path: of the file, in a folder that is there; a file that is there is replaced.
        manifest: its ``blobs`` and ``format_version`` are ignored and written anew.
        blobs: raw bytes by key (``blob_key``), exactly those that the variants name.

    Returns:
        The digest of the package.

    Raises:
        InputError: blobs that do not fit the manifest, or a manifest that is wrong.
        OutputError: the path cannot be written.
    """
    keys = _checked_keys(manifest, blobs)
    index, frames = _compress_all(manifest, keys, blobs)
    manifest = replace(manifest, blobs=index, format_version=FORMAT_VERSION)
    try:
        Manifest.from_dict(manifest.to_dict())
        front, digest = pack_front(manifest)
    except IntegrityError as error:
        raise InputError(error.problem, expected=error.expected, found=error.found) from error
    except (RecursionError, TypeError, ValueError) as error:
        raise InputError(f"the manifest cannot be written: {error}") from error
    replace_file(Path(path), front, *frames)
    return digest


def _checked_keys(manifest: Manifest, blobs: Mapping[str, bytes]) -> list[str]:
    keys = list(dict.fromkeys(key for variant in manifest.variants for key in variant.blobs))
    if set(keys) != blobs.keys():
        missing, extra = sorted(set(keys) - blobs.keys()), sorted(blobs.keys() - set(keys))
        raise InputError(
            "the blobs are not those that the manifest's variants name",
            expected=f"also {', '.join(missing)}" if missing else None,
            found=f"also {', '.join(extra)}" if extra else None,
        )
    for key in keys:
        if blob_key(blobs[key]) != key:
            raise InputError("a blob's key is not its SHA-256", expected=blob_key(blobs[key]), found=key)
        if len(blobs[key]) > MAX_BLOB:
            raise InputError(f"blob {key} is too large", expected=f"at most {MAX_BLOB} bytes")
    return keys


def _compress_all(
    manifest: Manifest, keys: list[str], blobs: Mapping[str, bytes]
) -> tuple[dict[str, Blob], list[bytes]]:
    dictionaries = choose_dictionaries(manifest.variants, {key: len(raw) for key, raw in blobs.items()})
    index: dict[str, Blob] = {}
    frames: list[bytes] = []
    offset = 0
    for key in keys:
        dictionary = dictionaries.get(key)
        frame = compress(blobs[key], blobs[dictionary] if dictionary else None)
        index[key] = Blob(
            offset=offset,
            size=len(frame),
            raw_size=len(blobs[key]),
            frame_sha256=hashlib.sha256(frame).hexdigest(),
            dictionary=dictionary,
        )
        frames.append(frame)
        offset += len(frame)
    return index, frames
