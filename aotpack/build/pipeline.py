"""From specs and targets to one package file: workers in their own processes, then the file."""

from __future__ import annotations

import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aotpack.build.contents import bill_of_materials
from aotpack.build.kinds import kernels_of
from aotpack.build.parallel import usable_cores
from aotpack.build.running import Stage, run_worker
from aotpack.build.shipped import shipped
from aotpack.build.variants import variants
from aotpack.errors import InputError, UnsupportedError
from aotpack.files import check_writable
from aotpack.own import importable, resolve
from aotpack.package import Manifest, Variant, write_package
from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning import Tuning, to_provenance
from aotpack.tuning.tuned import Choices

__all__ = ["CALLING_CONVENTION", "BuildReport", "Stage", "build"]

# Version of the programs' calling convention: the order and meaning of their tensors.
# 1: block_mask, forward(q, k, v, mask...) -> out, lse and backward(..., grad.out, grad.lse) -> grad.q, k, v.
# 2: the tiles of a CPU mask are bits, uint8 [P,128,16] (blocks.packed); they were bool [P,128,128] in 1. CUDA
#    programs have no tiles: nothing changed for them.
# A score's tensors are inputs score.NAME, those with a gradient first; backward returns grad.score.NAME.
# With the bound "rows", programs take float32 chunks of whole blocks, and "rows" (build/programs_scored.py).
CALLING_CONVENTION: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildReport:
    """What a build made.

    Attributes:
        path: the package.
        digest: SHA-256 of its manifest.
        size: of the file, in bytes.
        seconds: of the whole build.
        stages: every finished stage.
    """

    path: Path
    digest: str
    size: int
    seconds: float
    stages: tuple[Stage, ...]


def build(
    specs: Mapping[str, AttentionSpec],
    targets: Sequence[Target | str],
    output: str | os.PathLike[str],
    *,
    shapes: Sequence[tuple[int, int, int]] = (),
    template: bool = False,
    tuning: Tuning | None = None,
    jobs: int | None = None,
    progress: Callable[[Stage], None] | None = None,
) -> BuildReport:
    """Compiles specs for targets into one package.

    Args:
        specs: by the name under which the trainer asks for them. Rules of the user's own are imported here
            and in the build's worker; the current folder counts.
        targets: device types; ``"cpu"`` is this machine's portable default.
        output: the package file; written at the very end, all or nothing.
        shapes: (batch, query length, key length) for which CUDA variants get programs of their own, beside
            those for any length.
        template: compile torch's flex attention for CUDA also where aotpack has kernels of its own, which
            are compared with it.
        tuning: where kernel options for CUDA come from; the records that are shipped with aotpack, if not
            given. What was chosen is part of the manifest.
        jobs: how many programs are compiled at a time; as many as the machine has cores, if not given. The
            package does not depend on it.
        progress: called as each stage begins and ends; stages overlap.

    Raises:
        TargetError, SpecError, UnsupportedError, InputError: before anything is compiled.
        OutputError: ``output`` cannot be written; found out before anything is compiled.
        HostError: the machine has no compiler, or a torch that cannot build.
        BuildError: the compilation failed.
    """
    start = time.perf_counter()
    chosen = [Target.parse(t) if isinstance(t, str) else t for t in targets]
    chosen = list(dict.fromkeys(chosen))
    path = Path(output)
    _check(specs, chosen, path)
    if jobs is not None and jobs < 1:
        raise InputError("no program can be compiled", expected="jobs of 1 or more", found=jobs)
    with importable(Path.cwd()):
        specs = {name: resolve(spec) for name, spec in specs.items()}
    _check_shapes(specs, chosen, shapes)
    tuning = shipped() if tuning is None else tuning
    tuning.check(chosen, specs)
    tuned = {
        (str(target), spec.digest): tuning.chosen(target, spec, kernels_of(spec, target, template=template))
        for target in chosen
        for spec in specs.values()
    }
    stages: list[Stage] = []

    def note(stage: Stage) -> None:
        if stage.seconds is not None:
            stages.append(stage)
        if progress is not None:
            progress(stage)

    blobs: dict[str, bytes] = {}
    made: list[Variant] = []
    tools: dict[str, str] = {}
    for target in chosen:
        with tempfile.TemporaryDirectory(prefix="aotpack-build-") as folder:
            options = {
                "shapes": [list(shape) for shape in shapes],
                "template": template,
                "jobs": jobs or usable_cores(),
                "tuned": {
                    spec: _plain(found) for (name, spec), found in tuned.items() if name == str(target)
                },
            }
            result = run_worker(specs, target, options, Path(folder), note)
            made += variants(result["variants"], target, blobs)
            tools |= result["tools"]
    manifest = Manifest(
        calling_convention=CALLING_CONVENTION,
        specs=dict(specs),
        variants=tuple(made),
        provenance={
            **tools,
            "options": {
                "shapes": [list(shape) for shape in shapes],
                **({"template": True} if template else {}),
                **({"tuning": to_provenance(tuned)} if any(t.device == "cuda" for t in chosen) else {}),
            },
            **_precisions(specs),
            "sbom": bill_of_materials(tools),
        },
    )
    digest = write_package(path, manifest, blobs)
    seconds = time.perf_counter() - start
    return BuildReport(
        path=path, digest=digest, size=path.stat().st_size, seconds=seconds, stages=tuple(stages)
    )


def _plain(choices: Choices) -> dict[str, dict[str, dict[str, int]]]:
    return {
        each: {direction: dict(choice.options) for direction, choice in directions.items()}
        for each, directions in choices.items()
    }


def _precisions(specs: Mapping[str, AttentionSpec]) -> dict[str, str]:
    """The matmul precision of each float32 spec, which a spec leaves out where it is the default."""
    found = [f"{name} {spec.matmul_precision}" for name, spec in specs.items() if spec.matmul_precision]
    return {"float32_matmul_precision": ", ".join(found)} if found else {}


def _check(specs: Mapping[str, AttentionSpec], targets: Sequence[Target], path: Path) -> None:
    if not specs or not targets:
        raise InputError("nothing to build", expected="at least one spec and one target")
    for name in specs:
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", name):
            raise InputError(f"{name!r} cannot be a spec's name", expected="letters, digits and _ . + -")
    for target in targets:
        if target.device == "cpu" and target.arch.partition("-")[0] != platform.machine():
            raise UnsupportedError(
                f"target {target} cannot be built on a {platform.machine()} machine",
                remedy=f"build it on a machine of type {target.arch.partition('-')[0]}",
            )
    check_writable(path)


def _check_shapes(
    specs: Mapping[str, AttentionSpec], targets: Sequence[Target], shapes: Sequence[tuple[int, int, int]]
) -> None:
    if shapes and not any(target.device == "cuda" for target in targets):
        raise InputError(
            "exact shapes are for CUDA targets",
            expected="a CUDA target",
            found=", ".join(map(str, targets)),
            remedy="leave the shapes out: CPU programs take any length at the same speed",
        )
    for name, spec in specs.items():
        for shape in shapes:
            if reason := _unfit(spec, *shape):
                raise InputError(
                    f"the shape {','.join(map(str, shape))} does not fit the spec {name!r}",
                    expected="batch, query length and key length, in tokens",
                    found=reason,
                )


def _unfit(spec: AttentionSpec, batch: int, query: int, key: int) -> str | None:
    block = spec.mask.draft_size
    if min(batch, query, key) < 1:
        return "a length below 1"
    drafts = any(leaf.block_size for leaf in spec.mask.leaves())
    if drafts and (query % block or key <= query):
        return f"not whole blocks of {block} query rows that are also the last keys, after some context"
    largest = batch * max(spec.heads * query, spec.kv_heads * key) * max(spec.head_dim, spec.value_dim)
    return "a tensor of 2**31 elements or more" if largest >= 1 << 31 else None
