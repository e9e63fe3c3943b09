"""Whether a package is what its specs, targets and toolchain make: built again and compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aotpack.build.contents import toolchain
from aotpack.build.kinds import kernels_of
from aotpack.build.pipeline import BuildReport, Stage, build
from aotpack.errors import HostError, InputError, IntegrityError
from aotpack.package import Manifest, Package, Variant
from aotpack.targets import Target
from aotpack.tuning import Frozen, Tuning

__all__ = ["check_build"]


def check_build(
    path: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    progress: Callable[[Stage], None] | None = None,
) -> BuildReport:
    """Builds a package again, elsewhere, and compares it with the one that is there, byte for byte.

    Args:
        path: the package file; it is only read.
        jobs, progress: as in ``build``.

    Returns:
        The report of the second build, with the path of the package.

    Raises:
        HostError: this machine has another toolchain, which makes other bytes.
        IntegrityError: the bytes differ; every differing part is named.
        InputError: the file is no package that says how it was built.
    """
    with Package.open(path) as package:
        manifest, digest = package.manifest, package.digest
    targets = [Target.parse(name) for name in manifest.targets]
    _check_toolchain(manifest.provenance, toolchain(targets))
    options = manifest.provenance.get("options")
    if not isinstance(options, Mapping):
        raise InputError(f"{path} does not say with which options it was built", remedy="build it again")
    shapes = [(shape[0], shape[1], shape[2]) for shape in options["shapes"]]
    template = bool(options.get("template", False))
    with tempfile.TemporaryDirectory(prefix="aotpack-check-") as folder:
        again = Path(folder) / "again.aotpack"
        report = build(
            manifest.specs,
            targets,
            again,
            shapes=shapes,
            template=template,
            tuning=_tuning(options, manifest, template=template),
            jobs=jobs,
            progress=progress,
        )
        with Package.open(again) as package:
            made = package.manifest
    if report.digest != digest:
        differing = list(_differences(manifest, made)) or ["the manifest alone"]
        raise IntegrityError(
            f"{path} is not what its specs and toolchain make here",
            expected=f"digest {report.digest}",
            found=f"digest {digest}; other bytes in\n    " + "\n    ".join(differing),
            remedy="trust neither before you know why they differ",
        )
    return BuildReport(
        path=Path(path), digest=digest, size=report.size, seconds=report.seconds, stages=report.stages
    )


def _tuning(options: Mapping[str, Any], manifest: Manifest, *, template: bool) -> Tuning | None:
    """What the package says was chosen; older ones do not, and were built with what is shipped."""
    if "tuning" not in options:
        return None
    kernels = {
        (target, spec.digest): kernels_of(spec, Target.parse(target), template=template)
        for target in manifest.targets
        for spec in manifest.specs.values()
    }
    return Frozen.from_provenance(options["tuning"], kernels)


def _check_toolchain(recorded: Mapping[str, object], here: Mapping[str, str]) -> None:
    others = [name for name, found in here.items() if recorded.get(name) != found]
    if others:
        raise HostError(
            "another toolchain makes other bytes, so that a build here would prove nothing",
            expected=", ".join(f"{name} {recorded.get(name, 'unknown')}" for name in others),
            found=", ".join(f"{name} {here[name]}" for name in others),
            remedy="check it in an environment with those versions",
        )


def _differences(one: Manifest, other: Manifest) -> Iterator[str]:
    for mine, theirs in zip(one.variants, other.variants, strict=True):
        name = next(name for name, spec in one.specs.items() if spec.digest == mine.spec)
        parts, others = _parts(mine), _parts(theirs)
        for part in sorted({**parts, **others}):
            if parts.get(part) != others.get(part):
                yield f"{name} for {mine.target}: {part}"


def _parts(variant: Variant) -> dict[str, str]:
    parts = {} if variant.vectors is None else {"golden vectors": variant.vectors}
    for program in variant.programs:
        label = f"{program.specialisation} {program.name}"
        parts[f"{label} library"] = program.library
        parts |= {f"{label} kernel {name}": key for name, key in program.kernels}
    return parts
