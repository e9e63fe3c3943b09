"""The build's own process: ``python -m aotpack.build.worker JOB``.

JOB is a JSON file: ``specs`` by name, ``target``, ``shapes`` ([batch, query, key] each), ``template`` and
``folder``, as ``aotpack.build.build`` has them.
Progress goes to stdout, one JSON object a line; the results are files in the folder and ``result.json``,
which names them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch

from aotpack.build.compile import compile_cpu
from aotpack.build.contents import toolchain
from aotpack.build.export import Graph, differentiate, export
from aotpack.build.facts import library_facts
from aotpack.build.programs import attention_program, block_mask_program
from aotpack.build.toolchain import HOST_FLAGS, HostFlags, compile_kernels, hide_paths
from aotpack.build.vectors import TOLERANCE, golden_vectors
from aotpack.errors import AotpackError, HostError
from aotpack.masks import family_of
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import Target

__all__ = ["main"]

TRIED: Final = ("2.13", "2.14")
_Made = dict[str, list[dict[str, Any]]]


def main(job_file: str) -> int:
    """Runs a job; an error of ours ends it with exit code 3 and the error on stdout's last line."""
    job = json.loads(Path(job_file).read_text())
    folder = Path(job["folder"])
    specs = {name: AttentionSpec.from_dict(spec) for name, spec in job["specs"].items()}
    try:
        _check_torch()
        for spec in specs.values():
            family_of(spec.mask)
        target = Target.parse(job["target"])
        if target.device == "cuda":
            result = _build_cuda(specs, target, job["shapes"], folder, template=job["template"])
        else:
            result = _build_cpu(specs, target, folder)
    except AotpackError as error:
        _say(error=type(error).__name__, problem=error.problem, **error.diagnostics())
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


def _distinct(specs: dict[str, AttentionSpec]) -> dict[str, tuple[str, AttentionSpec]]:
    """One variant a spec, whatever names it goes by."""
    return {spec.digest: (name, spec) for name, spec in specs.items()}


def _build_cuda(
    specs: dict[str, AttentionSpec],
    target: Target,
    shapes: list[list[int]],
    folder: Path,
    *,
    template: bool,
) -> dict[str, Any]:
    # Imported here, because it needs triton.
    from aotpack.build.specialisations import exact
    from aotpack.build.variants_cuda import cuda_programs

    hide_paths(folder)
    more = [exact(*shape) for shape in shapes]
    found = {}
    for digest, (name, spec) in _distinct(specs).items():
        programs = cuda_programs(name, spec, target, folder, _stage, more, template=template)
        found[digest] = _variant(name, spec, programs, folder)
    return found


def _build_cpu(specs: dict[str, AttentionSpec], target: Target, folder: Path) -> dict[str, Any]:
    hide_paths(folder)
    flags = HOST_FLAGS[target.arch]
    with _stage("kernels"):
        compile_kernels(flags, folder)
    made: _Made = {}
    return {
        digest: _variant(name, spec, _cpu_programs(name, spec, flags, made), folder)
        for digest, (name, spec) in _distinct(specs).items()
    }


def _variant(name: str, spec: AttentionSpec, programs: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    with _stage("vectors", name):
        vectors = folder / f"{spec.digest}.safetensors"
        vectors.write_bytes(golden_vectors(spec))
    names = ("out", "lse", "grad.q", "grad.k", "grad.v")
    tolerance = dict.fromkeys(names, TOLERANCE[spec.dtype])
    return {"programs": programs, "vectors": str(vectors), "tolerance": tolerance}


def _cpu_programs(name: str, spec: AttentionSpec, flags: HostFlags, made: _Made) -> list[dict[str, Any]]:
    # Tiles carry the mask into the CPU kernels: specs that differ in the mask alone share their attention,
    # and specs of one mask share its block-mask program.
    attention, mask = replace(spec, mask=MaskSpec(family="full")).digest, repr(spec.mask)
    if attention not in made:
        forward, backward = differentiate(attention_program(spec))
        graphs = {"forward": forward, "backward": backward}
        made[attention] = [_program(n, graph, flags, name) for n, graph in graphs.items()]
    if mask not in made:
        made[mask] = [_program("block_mask", export(block_mask_program(spec)), flags, name)]
    return made[mask] + made[attention]


def _program(program: str, graph: Graph, flags: HostFlags, spec: str) -> dict[str, Any]:
    with _stage(program, spec):
        library = compile_cpu(graph, flags, kernels=program != "block_mask")
        return library_facts(program, graph, library, flags)


@contextlib.contextmanager
def _stage(name: str, spec: str | None = None) -> Iterator[None]:
    _say(stage=name, spec=spec)
    start = time.perf_counter()
    yield
    _say(stage=name, spec=spec, seconds=time.perf_counter() - start)


def _say(**line: object) -> None:
    print(json.dumps(line), file=_progress, flush=True)


if __name__ == "__main__":
    # Compilers print to stdout too; only this stream is progress.
    _progress, sys.stdout = sys.stdout, sys.stderr
    sys.exit(main(sys.argv[1]))
