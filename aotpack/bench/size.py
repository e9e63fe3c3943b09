"""``size``: what has to be shipped to a node, against what users ship without us."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from aotpack.bench.case import Case, Shape
from aotpack.bench.protocol import RefusedError, Timing, run_job
from aotpack.bench.results import OWN, Result, against
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "MB (10**6 bytes): what one node reads of the package, the variant of one spec with the index, "
    "against the same libraries as torch's .pt2 files and against what a cold torch.compile leaves for "
    "later processes; then the package's parts"
)
_PT2: Final = "torch's .pt2 files, same libraries"
_CACHE: Final = "torch.compile's warm cache folder, {}"
_MEGA: Final = "torch.compile's mega-cache, {}"
_PRECOMPILED: Final = "torch.compiler.precompile's two files, dense attention"


def run(settings: Settings) -> Result:
    """Measures the package's first spec."""
    name, spec = settings.first()
    (shape,) = settings.shapes([Shape(context=512, anchors=32)], [Shape(context=4096, anchors=512)])
    case = settings.case(name, shape)
    settings.say("size: package")
    with tempfile.TemporaryDirectory(prefix="aotpack-bench-") as folder:
        own = run_job("sizes:package", Path(folder), case, timeout=settings.timeout)
        rivals: dict[str, float | str] = {_PT2: own["pt2"], **_caches(settings, case, Path(folder))}
    rows = against("one variant", _megabytes({OWN: own["read"], **rivals}), "MB")
    parts = {OWN: own["read"], **{f"aotpack: {part}": size for part, size in own["parts"].items()}}
    parts["aotpack: unpacked in the store"] = own["unpacked"]
    parts[f"aotpack: whole file, {own['specs']} specs and {own['variants']} variants"] = own["file"]
    rows += against("parts", _megabytes(parts), "MB")
    facts = {**own["facts"], "dtype": spec.dtype, **asdict(shape)}
    return Result(name="size", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _caches(settings: Settings, case: Case, folder: Path) -> dict[str, float | str]:
    what = "flex_attention" if settings.cuda else "dense attention"
    cache, mega = _CACHE.format(what), _MEGA.format(what)
    found: dict[str, float | str] = {}
    if not {"flex", "compiled-dense"} & settings.without:
        settings.say(f"size: {cache}")
        saved, where = folder / "artifacts", folder / "rival"
        job, more = "cold:compiled_dense", {"artifacts": str(saved), "keep_artifacts": True}
        if settings.cuda:
            job, more = "cold:compiled_flex", {**more, "backward": True}
        try:
            run_job(job, where, case, timeout=settings.timeout, **more)
            found |= {cache: _tree(where / "inductor"), mega: saved.stat().st_size}
        except RefusedError as refusal:
            settings.say(f"  {refusal.problem}")
            found |= {cache: refusal.problem, mega: refusal.problem}
    if not settings.cuda and "precompile" not in settings.without:
        settings.say(f"size: {_PRECOMPILED}")
        where = folder / "precompiled"
        try:
            answer = run_job(
                "cold:make_precompiled", where, case, timeout=settings.timeout, folder=str(where)
            )
            found[_PRECOMPILED] = answer["bytes"]
        except RefusedError as refusal:
            settings.say(f"  {refusal.problem}")
            found[_PRECOMPILED] = refusal.problem
    return found


def _tree(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _megabytes(sizes: Mapping[str, Any]) -> dict[str, Timing | str]:
    return {who: size if isinstance(size, str) else Timing.of([size / 1e6]) for who, size in sizes.items()}
