"""Bytes of a package's variant, and of its libraries as .pt2 files."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from aotpack.bench.case import Case
from aotpack.bench.jobs.torch_loader import write_programs
from aotpack.package import Package, Variant
from aotpack.runtime.loading import variants_here

__all__ = ["package"]


def package(case: Case) -> dict[str, Any]:
    """What the variant for the device takes in the file and unpacked, with its parts; and as .pt2 files."""
    with Package.open(case.package) as opened, tempfile.TemporaryDirectory() as folder:
        manifest = opened.manifest
        variant = variants_here(manifest, case.device)[manifest.specs[case.spec].digest]
        blobs, parts = manifest.blobs, _parts(variant)
        named = {d for key in variant.blobs if (d := blobs[key].dictionary) is not None}
        # A variant may be compressed with the bytes of another one.
        dictionaries = named - set(variant.blobs)
        sizes = {part: sum(blobs[key].size for key in keys) for part, keys in parts.items()}
        files = write_programs(opened, variant, Path(folder), case.device)
        index = opened.size - sum(blob.size for blob in blobs.values())
        return {
            "file": opened.size,
            "specs": len(manifest.specs),
            "variants": len(manifest.variants),
            "read": index + sum(blobs[key].size for key in {*variant.blobs, *dictionaries}),
            "unpacked": sum(blobs[key].raw_size for key in variant.blobs),
            "parts": {"index": index, **sizes, "dictionaries": sum(blobs[key].size for key in dictionaries)},
            "pt2": sum(path.stat().st_size for path in files),
        }


def _parts(variant: Variant) -> dict[str, set[str]]:
    """Keys of blobs by what they are for; a blob that serves twice is counted where it comes first."""
    found: dict[str, set[str]] = defaultdict(set)
    seen: set[str] = set()
    for program in variant.programs:
        keys = {program.library, *(key for _, key in program.kernels)} - seen
        found[program.name] |= keys
        seen |= keys
    found["vectors"] = {variant.vectors} - seen - {None} if variant.vectors else set()
    return found
