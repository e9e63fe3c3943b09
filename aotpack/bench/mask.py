"""``mask``: a step's block mask against torch's create_block_mask."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from aotpack.bench.case import Shape
from aotpack.bench.compare import entries, facts_of, group, in_turn, part_of
from aotpack.bench.results import Result, Row
from aotpack.bench.settings import Settings

__all__ = ["run"]

_MEASURED: Final = (
    "median seconds of one step's block mask, each way in a process of its own, warm, all measured in "
    "turn; device events on CUDA, wall time on the CPU"
)
_CPU: Final = (Shape(context=512, anchors=512),)
_CUDA: Final = (Shape(context=4096, anchors=512), Shape(batch=4, context=3072, anchors=512))


def run(settings: Settings) -> Result:
    """Measures the package's first spec."""
    name, _ = settings.first()
    shapes = settings.shapes(_CPU, _CUDA)
    rows: list[Row] = []
    facts: dict[str, Any] = {}
    for shape in shapes:
        settings.say(f"mask {shape}")
        known = entries("steady:mask", ("aotpack", "mask-eager", "mask-compiled"))
        found = in_turn(settings, settings.case(name, shape), known)
        facts |= facts_of(found)
        rows += group(f"block mask {shape}", found, part_of("mask"))
    facts |= {"repeat": settings.repeat, "shapes": [asdict(shape) for shape in shapes]}
    return Result(name="mask", measured=_MEASURED, rows=tuple(rows), facts=facts)
