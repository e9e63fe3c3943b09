"""Blobs and their zstd frames: keys, compression, bounded decompression, choice of dictionaries."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from aotpack.package.manifest import Variant

if TYPE_CHECKING:
    import zstandard

__all__ = ["LEVEL", "as_dictionary", "blob_key", "choose_dictionaries", "compress", "decompress"]

LEVEL = 19


def blob_key(raw: bytes) -> str:
    """Key of a blob: the SHA-256 of its raw bytes, in hex."""
    return hashlib.sha256(raw).hexdigest()


def as_dictionary(raw: bytes | None) -> zstandard.ZstdCompressionDict | None:
    """A blob as the raw-content dictionary of other frames; threads may share it. None of no bytes."""
    if not raw:
        return None
    # Imported here: a load of what is unpacked already decompresses nothing.
    import zstandard

    return zstandard.ZstdCompressionDict(raw, dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def compress(raw: bytes, dictionary: bytes | None = None) -> bytes:
    """One zstd frame that states its content size; the same bytes for the same input and libzstd."""
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, dict_data=as_dictionary(dictionary)).compress(raw)


def decompress(frame: bytes, raw_size: int, dictionary: zstandard.ZstdCompressionDict | None = None) -> bytes:
    """The raw bytes of one frame; never allocates more than ``raw_size`` bytes for them.

    Args:
        frame: the compressed bytes.
        raw_size: how many bytes they must give.
        dictionary: ``as_dictionary`` of a raw blob. To make it takes longer than to decompress a frame.

    Raises:
        ValueError: anything but one whole frame of exactly that many bytes.
    """
    import zstandard

    try:
        # Checked first: zstandard allocates what the frame's header claims.
        if zstandard.frame_content_size(frame) != raw_size:
            raise ValueError("the frame states another size")
        decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)
        raw = decompressor.decompress(frame, max_output_size=raw_size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(raw) != raw_size:
        raise ValueError("the frame holds another number of bytes")
    return raw


def choose_dictionaries(variants: Iterable[Variant], sizes: Mapping[str, int]) -> dict[str, str]:
    """Which blob to compress with which other blob as dictionary.

    All libraries of a target repeat the same runtime, and its cubins the same code around each mask; so
    the largest of each kind for a target (the smaller key on a tie) serves the others.
    """
    groups = list(_groups(variants).values())
    bases = [min(group, key=lambda key: (-sizes[key], key)) for group in groups]
    chosen: dict[str, str] = {}
    for base, group in zip(bases, groups, strict=True):
        for key in group:
            if key not in bases and sizes[key]:
                chosen.setdefault(key, base)
    return chosen


def _groups(variants: Iterable[Variant]) -> dict[tuple[str, str], list[str]]:
    groups: dict[tuple[str, str], list[str]] = {}
    for variant in variants:
        for kind, key in _kinds(variant):
            groups.setdefault((variant.target, kind), []).append(key)
    return dict(sorted(groups.items()))


def _kinds(variant: Variant) -> Iterator[tuple[str, str]]:
    for program in variant.programs:
        yield "library", program.library
        yield from (("kernel", key) for _, key in program.kernels)
