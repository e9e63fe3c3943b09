"""The build's own process: ``python -m aotpack.build.worker JOB``.

JOB is a JSON file: ``specs`` by name, ``target``, ``shapes`` ([batch, query, key] each), ``template``
(torch's where there are kernels of ours), ``tuned`` (kernel options by digest of the spec, length class and
direction), ``modules`` (where a user's own rules come from), ``jobs`` (how many processes at a time) and
``folder``. With ``candidates`` (a length class and [direction, options] each) it compiles those of the only
spec instead.
Progress goes to stdout, one JSON object a line; the results are files in the folder and ``result.json``,
which names them.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from aotpack.build.compile import compile_cpu
from aotpack.build.contents import toolchain
from aotpack.build.export import Graph, export
from aotpack.build.facts import library_facts
from aotpack.build.graphs_cpu import attention_graphs, is_chunked
from aotpack.build.parallel import fixed_addresses, side_by_side
from aotpack.build.programs import block_mask_program
from aotpack.build.programs_scored import BOUNDS
from aotpack.build.toolchain import HOST_FLAGS, HostFlags, compile_kernels, hide_paths
from aotpack.build.vectors import golden_vectors, tolerances
from aotpack.errors import AotpackError, HostError, SpecError
from aotpack.masks import family_of
from aotpack.own import resolve
from aotpack.scores import check_score
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import Target

__all__ = ["main"]

TRIED: Final = ("2.13", "2.14")
# By digest: the name it goes by in progress, and the spec.
_Specs = dict[str, tuple[str, AttentionSpec]]
# What compiles some programs, and a key that equal parts share.
_Part = tuple[str, Callable[[], list[dict[str, Any]]]]


def main(job_file: str) -> int:
    """Runs a job; an error of ours ends it with exit code 3 and the error on stdout's last line."""
    job = json.loads(Path(job_file).read_text())
    folder = Path(job["folder"])
    specs = {name: AttentionSpec.from_dict(spec) for name, spec in job["specs"].items()}
    try:
        _check_torch()
        # A pool of threads would not survive the forks, and results would depend on the machine's cores.
        torch.set_num_threads(1)
        fixed_addresses()
        sys.path[:0] = job["modules"]
        for spec in specs.values():
            family_of(resolve(spec).mask)
            check_score(spec)
            _try_rules(spec)
        target = Target.parse(job["target"])
        if "candidates" in job:
            result = _candidates(specs, target, job)
        else:
            parts_of, distinct = _parts_cuda if target.device == "cuda" else _parts_cpu, _distinct(specs)
            result = _build(distinct, parts_of(distinct, target, job), folder, job["jobs"])
    except AotpackError as error:
        # The nearest class that the parent knows: the builder has subclasses of its own.
        known = next(each for each in type(error).__mro__ if each.__module__ == AotpackError.__module__)
        _say(error=known.__name__, problem=error.problem, **error.diagnostics())
        return 3
    (folder / "result.json").write_text(json.dumps({"variants": result, "tools": toolchain([target])}))
    return 0


def _check_torch() -> None:
    if not torch.__version__.startswith(TRIED):
        raise HostError(
            "this torch cannot build packages",
            expected=" or ".join(f"torch {version}" for version in TRIED),
            found=f"torch {torch.__version__}",
            remedy="build in an environment with one of those; what it builds runs under torch 2.11 to 2.14",
        )


def _try_rules(spec: AttentionSpec) -> None:
    """Evaluates rules of the user's own once, before anything is compiled."""
    own = [rule.family for rule in spec.mask.leaves() if rule.own]
    try:
        if own:
            golden_vectors(spec)
    except AotpackError:
        raise
    except Exception as error:
        raise SpecError(
            f"the rule '{own[0]}' fails",
            expected="a rule that can be evaluated",
            found=f"{type(error).__name__}: {error}",
            remedy="call it with small tensors",
        ) from error


def _distinct(specs: dict[str, AttentionSpec]) -> _Specs:
    """One variant a spec, whatever names it goes by."""
    return {spec.digest: (name, spec) for name, spec in specs.items()}


def _parts_cuda(specs: _Specs, target: Target, job: dict[str, Any]) -> dict[str, list[_Part]]:
    # Imported here, because it needs triton.
    from aotpack.build.specialisations import exact
    from aotpack.build.variants_cuda import cuda_parts

    folder = Path(job["folder"])
    hide_paths(folder)
    more = [exact(*shape) for shape in job["shapes"]]
    found = {}
    for digest, (name, spec) in specs.items():
        compiled = cuda_parts(
            name,
            spec,
            target,
            folder,
            _stage,
            more,
            template=job["template"],
            tuned=job["tuned"].get(digest, {}),
        )
        found[digest] = [(f"{digest} {i}", part) for i, part in enumerate(compiled)]
    return found


def _candidates(specs: dict[str, AttentionSpec], target: Target, job: dict[str, Any]) -> dict[str, Any]:
    """The block mask's facts, and each candidate's or why there is none."""
    from aotpack.build.variants_cuda import candidate_parts

    ((name, spec),) = specs.items()
    folder, asked = Path(job["folder"]), job["candidates"]
    hide_paths(folder)
    parts = candidate_parts(name, spec, target, folder, _stage, asked["class"], asked["programs"])
    mask, *programs = (facts for (facts,) in side_by_side(parts, folder, job["jobs"]))
    return {"block_mask": mask, "programs": programs, "tolerance": tolerances(spec)}


def _parts_cpu(specs: _Specs, target: Target, job: dict[str, Any]) -> dict[str, list[_Part]]:
    folder = Path(job["folder"])
    hide_paths(folder)
    flags = HOST_FLAGS[target.arch]
    with _stage("kernels"):
        compile_kernels(flags, folder)
    return {
        digest: [
            (f"block mask {spec.mask!r}", partial(_cpu_block_mask, name, spec, flags)),
            (f"attention {_attention_of(spec)}", partial(_cpu_attention, name, spec, flags)),
        ]
        for digest, (name, spec) in specs.items()
    }


def _build(specs: _Specs, parts: dict[str, list[_Part]], folder: Path, jobs: int) -> dict[str, Any]:
    """Compiles each part once, however many specs have it, and puts the specs' variants together."""
    distinct: dict[str, Callable[[], list[dict[str, Any]]]] = {}
    for each in parts.values():
        for key, part in each:
            distinct.setdefault(key, part)
    made = dict(zip(distinct, side_by_side(list(distinct.values()), folder, jobs), strict=True))
    found = {}
    for digest, (name, spec) in specs.items():
        with _stage("vectors", name):
            vectors = folder / f"{digest}.safetensors"
            vectors.write_bytes(golden_vectors(spec))
        programs = [program for key, _ in parts[digest] for program in made[key]]
        found[digest] = {"programs": programs, "vectors": str(vectors), "tolerance": tolerances(spec)}
    return found


def _attention_of(spec: AttentionSpec) -> str:
    """What the attention programs of CPU specs have in common.

    Tiles carry the mask into the kernels, so specs that differ in the mask alone share them; gradients are
    bit-equal from run to run wherever a spec may ask for it.
    """
    return replace(spec, mask=MaskSpec(family="full"), deterministic=False).digest


def _cpu_attention(name: str, spec: AttentionSpec, flags: HostFlags) -> list[dict[str, Any]]:
    bounds = {"bounds": BOUNDS} if is_chunked(spec) else {}
    return [
        _program(program, graph, flags, name) | bounds
        for program, graph in zip(("forward", "backward"), attention_graphs(spec), strict=True)
    ]


def _cpu_block_mask(name: str, spec: AttentionSpec, flags: HostFlags) -> list[dict[str, Any]]:
    return [_program("block_mask", export(block_mask_program(spec)), flags, name, fused=True)]


def _program(program: str, graph: Graph, flags: HostFlags, spec: str, **how: bool) -> dict[str, Any]:
    with _stage(program, spec):
        library = compile_cpu(graph, flags, **how)
        return library_facts(program, graph, library, flags)


@contextlib.contextmanager
def _stage(name: str, spec: str | None = None) -> Iterator[None]:
    _say(stage=name, spec=spec)
    start = time.perf_counter()
    yield
    _say(stage=name, spec=spec, seconds=time.perf_counter() - start)


def _say(**line: object) -> None:
    # One write a line, because parts that run side by side say theirs at the same time, and print writes the
    # line's end by itself where PYTHONUNBUFFERED is set.
    os.write(_progress.fileno(), json.dumps(line).encode() + b"\n")


if __name__ == "__main__":
    # Compilers print to stdout too; only this stream is progress.
    _progress, sys.stdout = sys.stdout, sys.stderr
    sys.exit(main(sys.argv[1]))
