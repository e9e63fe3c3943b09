"""The ``.aotpack`` file: FORMAT.md has the format."""

from aotpack.package.archive import Package, write_package
from aotpack.package.frames import blob_key
from aotpack.package.manifest import Blob, Manifest, Program, Variant
from aotpack.package.source import FileSource, Source

__all__ = [
    "Blob",
    "FileSource",
    "Manifest",
    "Package",
    "Program",
    "Source",
    "Variant",
    "blob_key",
    "write_package",
]
