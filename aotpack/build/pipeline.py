"""From specs and targets to one package file: workers in their own processes, then the file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aotpack
from aotpack import errors
from aotpack.build.contents import bill_of_materials
from aotpack.build.parallel import usable_cores
from aotpack.errors import AotpackError, BuildError, InputError, OutputError, UnsupportedError
from aotpack.own import folders, importable, resolve
from aotpack.package import Manifest, Program, Variant, blob_key, write_package
from aotpack.spec import AttentionSpec
from aotpack.targets import CudaRequirements, Kernel, Requirements, Target, driver_floor

__all__ = ["CALLING_CONVENTION", "BuildReport", "Stage", "build"]

# Version of the programs' calling convention: the order and meaning of their tensors.
# 1: block_mask, forward(q, k, v, mask...) -> out, lse and backward(..., grad.out, grad.lse) -> grad.q, k, v.
# 2: the tiles of a CPU mask are bits, uint8 [P,128,16] (blocks.packed); they were bool [P,128,128] in 1. CUDA
#    programs have no tiles: nothing changed for them.
# A score's tensors are inputs score.NAME, those with a gradient first; backward returns grad.score.NAME.
# With the bound "rows", programs take float32 chunks of whole blocks, and "rows" (build/programs_scored.py).
CALLING_CONVENTION: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of a build; ``seconds`` is None when it begins."""

    target: str
    name: str
    spec: str | None
    seconds: float | None


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
        modules = _module_path(specs)
    _check_shapes(specs, chosen, shapes)
    stages: list[Stage] = []

    def note(stage: Stage) -> None:
        if stage.seconds is not None:
            stages.append(stage)
        if progress is not None:
            progress(stage)

    blobs: dict[str, bytes] = {}
    variants: list[Variant] = []
    tools: dict[str, str] = {}
    for target in chosen:
        with tempfile.TemporaryDirectory(prefix="aotpack-build-") as folder:
            options = {
                "shapes": [list(shape) for shape in shapes],
                "template": template,
                "jobs": jobs or usable_cores(),
            }
            result = _run_worker(specs, target, options, modules, Path(folder), note)
            variants += _variants(result["variants"], target, blobs)
            tools |= result["tools"]
    manifest = Manifest(
        calling_convention=CALLING_CONVENTION,
        specs=dict(specs),
        variants=tuple(variants),
        provenance={
            **tools,
            "options": {
                "shapes": [list(shape) for shape in shapes],
                **({"template": True} if template else {}),
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
    if reason := _unwritable(path):
        raise OutputError(
            f"{path} cannot be written",
            expected="a file in a folder that exists and is writable",
            found=reason,
            remedy="choose another path with -o",
        )


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


def _module_path(specs: Mapping[str, AttentionSpec]) -> list[str]:
    """Where rules of the user's own are imported from, and what they import; empty without such rules."""
    found = [folder for spec in specs.values() for folder in folders(spec)]
    here = [str(Path(place).resolve()) for place in sys.path]
    return list(dict.fromkeys([*found, *here])) if found else []


def _unwritable(path: Path) -> str | None:
    if path.is_dir():
        return "a folder"
    try:
        # Permissions alone do not tell: a file system may be read-only or full.
        with tempfile.TemporaryFile(dir=path.parent):
            return None
    except OSError as error:
        return f"folder {path.parent}: {error.strerror}"


def _run_worker(
    specs: Mapping[str, AttentionSpec],
    target: Target,
    options: Mapping[str, Any],
    modules: Sequence[str],
    folder: Path,
    note: Callable[[Stage], None],
) -> dict[str, Any]:
    job = {
        "specs": {n: s.to_dict() for n, s in specs.items()},
        "target": str(target),
        **options,
        "modules": list(modules),
        "folder": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "tmp").mkdir()
    log = folder / "log"
    with log.open("wb") as stderr:
        # A session of its own, so that an interrupt reaches the worker's compilers too, through us.
        worker = subprocess.Popen(
            [sys.executable, "-m", "aotpack.build.worker", str(folder / "job.json")],
            cwd=folder, env=_environment(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            failure = _follow(worker, target, note)
            code = worker.wait()
        except BaseException:
            _kill(worker)
            raise
    if failure is not None:
        raise failure
    if code != 0:
        raise BuildError(
            f"the build for {target} failed",
            found=_failure(log.read_text(errors="replace")) or f"exit code {code}",
            remedy="run 'aotpack doctor'; if it finds nothing, report this",
        )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _failure(log: str) -> str:
    """What a worker's log says of its failure: compilers' errors where there are any, else the end."""
    errors = [line for line in log.splitlines() if re.search(r"\b(fatal )?error:", line)]
    return "\n".join(errors)[-3000:] or log.strip()[-3000:]


def _follow(
    worker: subprocess.Popen[str], target: Target, note: Callable[[Stage], None]
) -> AotpackError | None:
    failure = None
    for line in worker.stdout or ():
        said = json.loads(line)
        if "error" in said:
            kind: type[AotpackError] = getattr(errors, said["error"])
            failure = kind(
                said["problem"],
                expected=said.get("expected"),
                found=said.get("found"),
                remedy=said.get("what to do"),
            )
        else:
            note(
                Stage(target=str(target), name=said["stage"], spec=said["spec"], seconds=said.get("seconds"))
            )
    return failure


def _kill(worker: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _environment(folder: Path) -> dict[str, str]:
    # Variables that would change what Inductor or the compiler makes are the build's own, not the user's.
    dropped = (
        "TORCHINDUCTOR_",
        "AOT_INDUCTOR",
        "AOTINDUCTOR",
        "TORCH_COMPILE",
        "TORCH_LOGS",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "CUDA_",
        "TRITON_",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    source = str(Path(aotpack.__file__).parent.parent)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")])),
        "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder / "tmp"),
        # A CUDA device of this machine takes no part; targets are device types.
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # Source lines are half of a cubin.
        "TRITON_DISABLE_LINE_INFO": "1",
        "LIBRARY_PATH": str(folder),
        # Otherwise export dies: "mul expected 2 arguments, got 3".
        "TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0",
    }


def _variants(result: Mapping[str, Any], target: Target, blobs: dict[str, bytes]) -> Iterator[Variant]:
    def add(path: str) -> str:
        data = Path(path).read_bytes()
        key = blob_key(data)
        blobs[key] = data
        return key

    for digest, made in result.items():
        programs = made["programs"]
        yield Variant(
            spec=digest,
            target=str(target),
            programs=tuple(
                Program(
                    name=p["name"],
                    specialisation=p.get("specialisation", "general"),
                    bounds=p.get("bounds", {}),
                    kernels=tuple((Path(c["path"]).name, add(c["path"])) for c in p.get("cubins", ())),
                    library=add(p["library"]),
                    inputs=tuple(p["inputs"]),
                    outputs=tuple(p["outputs"]),
                )
                for p in programs
            ),
            requires=_requirements(programs),
            vectors=add(made["vectors"]),
            tolerance=made["tolerance"],
        )


def _requirements(programs: Sequence[Mapping[str, Any]]) -> Requirements:
    def highest(name: str) -> str:
        return _highest(p[name] for p in programs)

    cubins = [cubin for p in programs for cubin in p.get("cubins", ())]
    return Requirements(
        instruction_set=programs[0]["instruction_set"],
        glibc=highest("glibc"),
        libstdcxx=highest("libstdcxx"),
        needed=tuple(sorted({n for p in programs for n in p["needed"]})),
        torch_symbols=tuple(sorted({s for p in programs for s in p["torch_symbols"]})),
        cuda=_cuda_requirements(cubins, programs) if cubins else None,
    )


def _cuda_requirements(
    cubins: Sequence[Mapping[str, Any]], programs: Sequence[Mapping[str, Any]]
) -> CudaRequirements:
    (capability,) = {cubin["capability"] for cubin in cubins}
    return CudaRequirements(
        capability=capability,
        kernels=tuple(Kernel(**kernel) for cubin in cubins for kernel in cubin["kernels"]),
        driver=driver_floor(_highest(cubin["toolkit"] for cubin in cubins)),
        ptx=_highest(cubin["ptx"] for cubin in cubins),
        symbols=tuple(sorted({s for p in programs for s in p["cuda_symbols"]})),
    )


def _highest(versions: Iterable[str]) -> str:
    return max(versions, key=lambda version: tuple(map(int, version.split("."))))
