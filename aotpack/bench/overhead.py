"""``overhead``: what the host pays for a call, with lengths so small that nothing else is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from aotpack.bench.case import Shape
from aotpack.bench.compare import entries, facts_of, group, in_turn, part_of
from aotpack.bench.protocol import Timing
from aotpack.bench.results import OWN, Result, Row, against
from aotpack.bench.rivals import step_rivals
from aotpack.bench.settings import Settings
from aotpack.bench.turns import Entry, Turns

__all__ = ["run"]

_MEASURED: Final = (
    "median microseconds of the host until a call returns, mean of 200 calls each; forward and backward "
    "through autograd; torch's own loader runs the same libraries without autograd and shows what allocation "
    "and launches take, and on the CPU, with one thread, the small kernels; an autograd function that "
    "computes nothing shows what autograd takes; what is beyond them is aotpack's own"
)
_CALLS: Final = {"forward": "forward call", "backward": "backward call", "mask": "block mask call"}
_TINY: Final = (Shape(context=16, anchors=1),)


def run(settings: Settings) -> Result:
    """Measures the package's first spec."""
    name, spec = settings.first()
    (shape,) = settings.shapes(_TINY, _TINY)
    settings.say("overhead")
    rivals = [who for who in step_rivals(settings.device) if who != "flex-autotune"]
    known = entries("steady:overhead", (*rivals, "nothing"))
    known["torch-loader"] = Entry(job="steady:loader_overhead", folder=Path("torch-loader"))
    found = in_turn(settings, settings.case(name, shape), known)
    rows: list[Row] = []
    for part in ("forward", "backward", "mask"):
        timed = {who: said for who, said in found.items() if (who, part) != ("nothing", "mask")}
        rows += group(f"call overhead, {_CALLS[part]}", timed, part_of(part), "us")
    for part in ("forward", "backward"):
        rows += _own(part, found)
    facts = {**facts_of(found), "dtype": spec.dtype, "repeat": settings.repeat, **asdict(shape)}
    return Result(name="overhead", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _own(part: str, found: Mapping[str, Turns | str]) -> list[Row]:
    """What is left of aotpack's calls without what autograd and the bare programs take; turn by turn."""
    known = [found.get(who) for who in ("aotpack", "nothing", "torch-loader")]
    turns = [each.of(part) for each in known if isinstance(each, Turns)]
    if len(turns) < len(known):
        return []
    left = [call - autograd - bare for call, autograd, bare in zip(*turns, strict=True)]
    return against(
        f"call overhead beyond autograd and launches, {_CALLS[part]}", {OWN: Timing.of(left)}, "us"
    )
