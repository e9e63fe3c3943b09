"""The program as users run it: a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from aotpack.package import Package, blob_key, write_package

COMMAND = [sys.executable, "-m", "aotpack"]


def aotpack(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a command line to its end; ``environment`` is added to this process's own."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def only_object(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object that is all of stdout."""
    found = json.loads(done.stdout)
    assert isinstance(found, dict), done.stdout
    assert next(iter(found)) == "schema"
    return found


def rewritten(
    package: Path, path: Path, *, tolerance: float | None = None, vectors: bytes | None = None
) -> Path:
    """A copy of a package of one variant with another tolerance or other golden vectors, rightly hashed."""
    with Package.open(package) as opened:
        manifest = opened.manifest
        (variant,) = manifest.variants
        blobs = {key: opened.read_blob(key) for key in variant.blobs}
    if tolerance is not None:
        variant = replace(variant, tolerance=dict.fromkeys(variant.tolerance, tolerance))
    if vectors is not None:
        assert variant.vectors is not None
        del blobs[variant.vectors]
        variant = replace(variant, vectors=blob_key(vectors))
        blobs[blob_key(vectors)] = vectors
    write_package(path, replace(manifest, variants=(variant,)), blobs)
    return path


def with_target(package: Path, path: Path, target: str) -> Path:
    """A copy of a package whose variants are said to be for another target."""
    with Package.open(package) as opened:
        manifest = opened.manifest
        blobs = {key: opened.read_blob(key) for key in manifest.blobs}
    foreign = tuple(replace(variant, target=target) for variant in manifest.variants)
    write_package(path, replace(manifest, variants=foreign), blobs)
    return path
