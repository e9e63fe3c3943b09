"""``coldstart``: how long until the first step is done, in fresh processes."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.protocol import RefusedError, Timing, run_job
from aotpack.bench.results import Result, against
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "seconds from a process that has imported torch and made q, k and v to the end of its first step, "
    "imports of everything else, load, mask and compilation included; each in a fresh process"
)
_OWN: Final = "aotpack, nothing unpacked yet: forward+backward"
_OWN_WARM: Final = "aotpack, unpacked by an earlier process: forward+backward"
_OWN_FORWARD: Final = "aotpack, nothing unpacked yet: forward only"
_EAGER: Final = "scaled_dot_product_attention, eager: forward+backward"
_DENSE: Final = "torch.compile(dense attention), {} cache: forward+backward"
_FLEX: Final = "torch.compile(flex_attention), {} cache: forward only"
_MAKE: Final = "torch.compiler.precompile(dense attention) itself, which is not in any start"
_PRECOMPILE: Final = "torch.compiler.precompile(dense attention), {}: forward+backward"


def run(settings: Settings) -> Result:
    """Measures aotpack, torch.compile with cold and warm caches, and torch.compiler.precompile."""
    name, spec = next(iter(settings.specs().items()))
    context, anchors = settings.context or 512, settings.anchors or 32
    case = {"package": str(settings.package.absolute()), "spec": name, "context": context, "anchors": anchors}
    times: dict[str, list[float]] = defaultdict(list)
    refusals: dict[str, str] = {}
    facts: dict[str, Any] = {}
    for turn in range(settings.repeat):
        settings.say(f"coldstart {turn + 1} of {settings.repeat}")
        with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
            for what, job, where, more in _jobs(Path(folder)):
                if what in refusals or (job == "precompiled_dense" and _MAKE in refusals):
                    continue
                settings.say(f"  {what}")
                try:
                    answer = run_job(f"cold:{job}", where, **case, **more)
                    times[what].append(answer["seconds"])
                    facts = answer["facts"]
                except RefusedError as refusal:
                    if what in (_OWN, _OWN_WARM, _OWN_FORWARD):
                        raise
                    refusals[what] = refusal.problem
    measured = {what: Timing.of(values) for what, values in times.items()}
    found: dict[str, Timing | str] = {**measured, **refusals}
    order = [what for what, *_ in _jobs(Path()) if what in found]
    training = [what for what in order if "forward only" not in what]
    forward = [what for what in order if "forward only" in what]
    rows = against(_OWN, {what: found[what] for what in training})
    rows += against(_OWN_FORWARD, {what: found[what] for what in forward})
    shape = {"dtype": spec.dtype, "batch": 1, "context": context, "anchors": anchors}
    return Result(name="coldstart", measured=_MEASURED, rows=tuple(rows), facts={**facts, **shape})


def _jobs(folder: Path) -> list[tuple[str, str, Path, dict[str, Any]]]:
    """What is measured, the job, the folder of its caches, and further arguments."""
    own, dense, flex, made = (folder / name for name in ("own", "dense", "flex", "precompile"))
    return [
        (_OWN, "aotpack", own, {"backward": True}),
        (_OWN_WARM, "aotpack", own, {"backward": True}),
        (_EAGER, "eager_dense", folder / "eager", {}),
        (_DENSE.format("cold"), "compiled_dense", dense, {}),
        (_DENSE.format("warm"), "compiled_dense", dense, {}),
        (_MAKE, "make_precompiled", made, {"folder": str(made)}),
        (_PRECOMPILE.format("its two files"), "precompiled_dense", folder / "new", {"folder": str(made)}),
        (_PRECOMPILE.format("and its warm cache"), "precompiled_dense", made, {"folder": str(made)}),
        (_OWN_FORWARD, "aotpack", folder / "forward", {"backward": False}),
        (_FLEX.format("cold"), "compiled_flex", flex, {}),
        (_FLEX.format("warm"), "compiled_flex", flex, {}),
    ]
