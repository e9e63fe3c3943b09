"""``scaling``: how a step's time grows with what its mask shows, the density staying the same."""

from __future__ import annotations

from typing import Any, Final

from aotpack.bench.case import Shape
from aotpack.bench.compare import entries, facts_of, group, in_turn
from aotpack.bench.protocol import Timing
from aotpack.bench.results import Result, Row, against
from aotpack.bench.settings import Settings
from aotpack.bench.turns import Turns

__all__ = ["run"]

_MEASURED: Final = (
    "median seconds of forward and backward, N = S/8, so that the mask shows the same share of the grid "
    "at every length; then the same over the visible 128x128 blocks of all heads, with ratios over "
    "aotpack's at the shortest context: 1 everywhere is a cost that follows the visible blocks"
)
_CONTEXTS: Final = (512, 1024, 2048, 4096, 8192)
# Dense math at 8192 would take minutes and tens of GB.
_RIVAL_UP_TO: Final = 2048


def run(settings: Settings) -> Result:
    """Measures the package's first spec; ``context`` is the longest context, ``anchors`` is not used."""
    name, spec = settings.first()
    longest = settings.context or _CONTEXTS[-1]
    contexts = [context for context in _CONTEXTS if context <= longest] or [longest]
    rows: list[Row] = []
    own: dict[str, Timing | str] = {}
    facts: dict[str, Any] = {}
    blocks: dict[str, int] = {}
    for context in contexts:
        shape = Shape(batch=settings.batch or 1, context=context, anchors=max(1, context // 8))
        settings.say(f"scaling {shape}")
        rivals = ("aotpack", "flex" if settings.cuda else "sdpa")
        known = rivals if settings.cuda or context <= _RIVAL_UP_TO else rivals[:1]
        found = in_turn(settings, settings.case(name, shape), entries("steady:step", known))
        facts |= facts_of(found)
        rows += group(f"S {context} forward+backward", found, _both)
        ours = found["aotpack"]
        assert isinstance(ours, Turns)
        shown = blocks[str(context)] = int(ours.info["blocks"])
        own[f"aotpack at S {context}"] = Timing.of(1e6 * both / shown for both in _both(ours))
    rows += against("per visible block", own, "us", own=next(iter(own)))
    facts |= {"dtype": spec.dtype, "repeat": settings.repeat, "batch": settings.batch or 1}
    facts["visible blocks"] = blocks
    return Result(name="scaling", measured=_MEASURED, rows=tuple(rows), facts=facts)


def _both(turns: Turns) -> list[float]:
    return [turn["forward"] + turn["backward"] for turn in turns.turns]
