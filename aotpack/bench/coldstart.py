"""``coldstart``: how long until the first step is done, in fresh processes."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.case import Shape
from aotpack.bench.protocol import RefusedError, Timing, run_job
from aotpack.bench.results import Result, against
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "seconds from a process that has imported torch and aotpack's reader of packages, made q, k and v and "
    "run the loss's own kernels to the end of its first step, with all other imports, load, mask and "
    "compilation; each in a fresh process"
)
_OWN: Final = "aotpack, nothing unpacked yet: forward+backward"
_OWN_WARM: Final = "aotpack, unpacked by an earlier process: forward+backward"
_OWN_FORWARD: Final = "aotpack, nothing unpacked yet: forward only"
_LOADER: Final = "torch's own loader, the same libraries: forward+backward without autograd"
_EAGER: Final = "scaled_dot_product_attention, eager: forward+backward"
_DENSE: Final = "torch.compile(dense attention), {} cache: forward+backward"
_MEGA: Final = "torch.compile(dense attention), mega-cache of another process: forward+backward"
_FLEX: Final = "torch.compile(flex_attention), {}: {}"
_MAKE: Final = "torch.compiler.precompile(dense attention) itself, which is not in any start"
_PRECOMPILE: Final = "torch.compiler.precompile(dense attention), {}: forward+backward"
_RIVALS: Final = {
    "torch_loader": "torch-loader",
    "eager_dense": "sdpa",
    "compiled_dense": "compiled-dense",
    "compiled_flex": "flex",
    "make_precompiled": "precompile",
    "precompiled_dense": "precompile",
}
_Job = tuple[str, str, Path, dict[str, Any]]


def run(settings: Settings) -> Result:
    """Measures aotpack, torch.compile with its caches in several states, and torch's own loaders."""
    name, spec = settings.first()
    (shape,) = settings.shapes([Shape(context=512, anchors=32)], [Shape(context=4096, anchors=512)])
    jobs = _cuda_jobs if settings.cuda else _cpu_jobs
    case = settings.case(name, shape)
    times: dict[str, list[float]] = defaultdict(list)
    refusals: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for turn in range(settings.repeat):
        settings.say(f"coldstart {turn + 1} of {settings.repeat}")
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
            for what, job, where, more in jobs(Path(folder)):
                if _RIVALS.get(job) in settings.without:
                    continue
                if what in refusals or (job == "precompiled_dense" and _MAKE in refusals):
                    continue
                try:
                    answer = run_job(f"cold:{job}", where, case, timeout=settings.timeout, **more)
                except RefusedError as refusal:
                    if what in (_OWN, _OWN_WARM, _OWN_FORWARD):
                        raise
                    refusals[what] = refusal.problem
                    settings.say(f"  {what}: {refusal.problem}")
                    continue
                settings.say(f"  {what}: {answer['seconds']:.3f} s")
                times[what].append(answer["seconds"])
                facts = answer["facts"]
    measured = {what: Timing.of(values) for what, values in times.items()}
    found: dict[str, Timing | str] = {**measured, **refusals}
    order = [what for what, *_ in jobs(Path()) if what in found]
    training = [what for what in order if "forward only" not in what]
    forward = [what for what in order if "forward only" in what]
    rows = against("", {what: found[what] for what in training}, own=_OWN)
    if forward:
        rows += against("", {what: found[what] for what in forward}, own=_OWN_FORWARD)
    facts |= {"dtype": spec.dtype, "repeat": settings.repeat, **asdict(shape)}
    return Result(name="coldstart", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _own(folder: Path) -> list[_Job]:
    """What is measured, the job, the folder of its caches, and further arguments."""
    own = folder / "own"
    return [
        (_OWN, "aotpack", own, {"backward": True}),
        (_OWN_WARM, "aotpack", own, {"backward": True}),
        (_LOADER, "torch_loader", folder / "loader", {}),
    ]


def _flex(folder: Path, what: str, state: str, cache: str, **more: Any) -> _Job:
    arguments = {"backward": "backward" in what, "artifacts": str(folder / "artifacts"), **more}
    return _FLEX.format(state, what), "compiled_flex", folder / cache, arguments


def _cuda_jobs(folder: Path) -> list[_Job]:
    step, none = "forward+backward", str(folder / "none")
    return [
        *_own(folder),
        # The cold run writes its mega-cache when its clock has stopped.
        _flex(folder, step, "cold cache", "flex", keep_artifacts=True),
        _flex(folder, step, "warm cache", "flex", artifacts=none),
        _flex(folder, step, "mega-cache of another process", "reader"),
    ]


def _cpu_jobs(folder: Path) -> list[_Job]:
    dense, made, none = folder / "dense", folder / "precompile", str(folder / "none")
    saved = str(folder / "dense-artifacts")
    return [
        *_own(folder),
        (_EAGER, "eager_dense", folder / "eager", {}),
        (_DENSE.format("cold"), "compiled_dense", dense, {"artifacts": saved, "keep_artifacts": True}),
        (_DENSE.format("warm"), "compiled_dense", dense, {"artifacts": none}),
        (_MEGA, "compiled_dense", folder / "reader", {"artifacts": saved}),
        (_MAKE, "make_precompiled", made, {"folder": str(made)}),
        (_PRECOMPILE.format("its two files"), "precompiled_dense", folder / "new", {"folder": str(made)}),
        (_PRECOMPILE.format("and its warm cache"), "precompiled_dense", made, {"folder": str(made)}),
        (_OWN_FORWARD, "aotpack", folder / "forward", {"backward": False}),
        _flex(folder, "forward only", "cold cache", "flex", artifacts=none),
        _flex(folder, "forward only", "warm cache", "flex", artifacts=none),
    ]
