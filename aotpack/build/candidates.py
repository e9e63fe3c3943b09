"""The first step of a tuning: a package for each combination of kernel options. Needs no GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aotpack.build.contents import bill_of_materials
from aotpack.build.kinds import kernels_of
from aotpack.build.parallel import usable_cores
from aotpack.build.pipeline import CALLING_CONVENTION
from aotpack.build.running import Stage, run_worker
from aotpack.build.search import checked_lengths, lengths_of, options_to_try
from aotpack.build.shipped import shipped
from aotpack.build.variants import variants
from aotpack.errors import BuildError, InputError, OutputError, UnsupportedError
from aotpack.package import Manifest, blob_key, write_package
from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning import (
    CLASSES,
    DIRECTIONS,
    Candidate,
    CandidateSet,
    Group,
    Options,
    Tuning,
    printable,
)

__all__ = ["Search", "build_candidates"]


# Options to try, the untuned first, for a spec, kernels, direction, and what an earlier tuning chose.
Search = Callable[[AttentionSpec, str, str, Options | None], Sequence[Options]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """What one worker made: facts of programs by direction, in the order of the options.

    There are no golden vectors: they are of any lengths, and most of a small package.
    """

    block_mask: Mapping[str, Any]
    programs: Mapping[str, Sequence[Mapping[str, Any]]]
    tolerance: Mapping[str, float]
    tools: Mapping[str, str]


def build_candidates(
    specs: Mapping[str, AttentionSpec],
    target: Target | str,
    folder: Path,
    *,
    template: bool = False,
    tuning: Tuning | None = None,
    search: Search = options_to_try,
    classes: Sequence[str] | None = None,
    jobs: int | None = None,
    progress: Callable[[Stage], None] | None = None,
) -> CandidateSet:
    """Builds the candidates of specs for one CUDA target, and an index of them.

    A candidate's package has one length class, and in the other direction the untuned program.

    Args:
        specs: by name.
        target: a CUDA device type.
        folder: for the packages; made if it is missing. The index grows with each spec and length class.
        template: tune torch's flex attention also where aotpack has kernels of its own.
        tuning: whose choices are tried too; what is shipped with aotpack, if not given.
        search: says which options to try.
        classes: length classes to tune; all, if not given.
        jobs, progress: as in ``build``.

    Raises:
        InputError, UnsupportedError, TargetError: before anything is compiled.
        HostError: the machine has no compiler, or a torch that cannot build.
        BuildError: not even the untuned programs can be built.
    """
    chosen = Target.parse(target) if isinstance(target, str) else target
    _check(specs, chosen)
    _make(folder)
    known, groups, tools = tuning or shipped(), list[Group](), {}
    for name, spec in {spec.digest: (name, spec) for name, spec in specs.items()}.values():
        kernels = kernels_of(spec, chosen, template=template)
        for each in [each for each in CLASSES[kernels] if classes is None or each in classes]:
            choices = known.chosen(chosen, spec, kernels).get(each, {})
            wanted = {
                d: search(spec, kernels, d, choices[d].options if d in choices else None) for d in DIRECTIONS
            }
            with tempfile.TemporaryDirectory(prefix="aotpack-tune-") as scratch:
                made = _compiled(name, spec, chosen, each, wanted, Path(scratch), jobs, progress)
                for direction, options in wanted.items():
                    packages = _packages(name, spec, chosen, each, direction, options, made, folder)
                    groups.append(_group(name, spec, kernels, each, direction, packages))
            tools = dict(made.tools)
            found = CandidateSet(target=chosen, tools=tools, groups=tuple(groups))
            found.write(folder)
    if not groups:
        raise InputError(
            "there is nothing to tune",
            expected="a length class of the specs' kernels",
            found=", ".join(classes or ()),
        )
    return CandidateSet(target=chosen, tools=tools, groups=tuple(groups))


def _check(specs: Mapping[str, AttentionSpec], target: Target) -> None:
    if target.capability is None:
        raise UnsupportedError(
            f"there is nothing to tune for {target}",
            expected="a CUDA target",
            remedy="leave --tune out: CPU kernels have no options",
        )
    for name, spec in specs.items():
        own = [leaf.family for leaf in spec.mask.leaves() if leaf.own or leaf.family == "recorded"]
        if spec.score is not None or own:
            raise UnsupportedError(
                f"{name!r} cannot be tuned",
                expected="a named mask and no score, for which inputs can be drawn",
                found=own[0] if own else f"the score {spec.score.family}" if spec.score else None,
                remedy="tune the same heads with a named mask, and leave mask and score out of the record",
            )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be made", found=error.strerror, remedy="choose another folder"
        ) from error


def _compiled(
    name: str,
    spec: AttentionSpec,
    target: Target,
    length_class: str,
    wanted: Mapping[str, Sequence[Options]],
    folder: Path,
    jobs: int | None,
    progress: Callable[[Stage], None] | None,
) -> _Made:
    programs = [[direction, dict(each)] for direction, options in wanted.items() for each in options]
    job = {
        "candidates": {"class": length_class, "programs": programs},
        "jobs": jobs or usable_cores(),
    }
    result = run_worker({name: spec}, target, job, folder, progress or (lambda stage: None))
    found = result["variants"]
    facts = iter(found["programs"])
    return _Made(
        block_mask=found["block_mask"],
        programs={direction: [next(facts) for _ in options] for direction, options in wanted.items()},
        tolerance=found["tolerance"],
        tools=result["tools"],
    )


def _group(
    name: str,
    spec: AttentionSpec,
    kernels: str,
    length_class: str,
    direction: str,
    candidates: tuple[Candidate, ...],
) -> Group:
    return Group(
        name=name,
        spec=spec,
        kernels=kernels,
        direction=direction,
        length_class=length_class,
        lengths=lengths_of(spec, length_class),
        checked=checked_lengths(spec, length_class),
        candidates=candidates,
    )


def _packages(
    name: str,
    spec: AttentionSpec,
    target: Target,
    length_class: str,
    direction: str,
    options: Sequence[Options],
    made: _Made,
    folder: Path,
) -> tuple[Candidate, ...]:
    """Writes the packages of one group."""
    plain = {each: _first(made.programs[each], name, target) for each in DIRECTIONS}
    seen = dict[tuple[str, ...], int]()
    found = []
    for number, (each, facts) in enumerate(zip(options, made.programs[direction], strict=True)):
        if "refused" in facts:
            found.append(Candidate(options=each, refused=printable(facts["refused"]) or "refused"))
            continue
        if (same := seen.setdefault(_code(facts), number)) != number:
            found.append(Candidate(options=each, refused=f"the same code as candidate {same}"))
            continue
        file = f"{spec.digest[:12]}.{length_class}.{direction}.{number:02}.aotpack"
        programs = {**plain, direction: facts}
        parts = [made.block_mask, *(programs[d] for d in DIRECTIONS)]
        _write(
            folder / file,
            name,
            spec,
            target,
            {"programs": parts, "tolerance": made.tolerance},
            made.tools,
            each,
        )
        found.append(Candidate(options=each, package=file))
    return tuple(found)


def _first(programs: Sequence[Mapping[str, Any]], name: str, target: Target) -> Mapping[str, Any]:
    """The first that was compiled: the untuned one, or on a small device one with smaller tiles."""
    for facts in programs:
        if "refused" not in facts:
            return facts
    raise BuildError(
        f"no candidate of {name!r} for {target} could be compiled",
        found=programs[0]["refused"] if programs else "no options to try",
        remedy="build without --tune, and report this if that fails too",
    )


def _code(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a program's library and cubins."""
    paths = [facts["library"], *sorted(cubin["path"] for cubin in facts["cubins"])]
    return tuple(blob_key(Path(path).read_bytes()) for path in paths)


def _write(
    path: Path,
    name: str,
    spec: AttentionSpec,
    target: Target,
    made: Mapping[str, Any],
    tools: Mapping[str, str],
    options: Options,
) -> None:
    blobs: dict[str, bytes] = {}
    manifest = Manifest(
        calling_convention=CALLING_CONVENTION,
        specs={name: spec},
        variants=tuple(variants({spec.digest: made}, target, blobs)),
        provenance={
            **tools,
            "options": {"shapes": [], "candidate": dict(options)},
            "sbom": bill_of_materials(tools),
        },
    )
    write_package(path, manifest, blobs)
