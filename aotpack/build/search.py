"""What a tuning tries: kernel options, and the lengths at which they are measured.

The blocks of a block mask stay 128x128. The mask's tensors are an argument of the call, one mask serves every
length class, direction and device, and programs that took lists of other blocks would need a mask of their
own for each; our own kernels have no such lists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Final

from aotpack.spec import AttentionSpec
from aotpack.tuning import Options
from aotpack.tuning.candidates import Lengths

__all__ = ["checked_lengths", "lengths_of", "options_to_try"]

_BLOCK: Final = 128  # of the mask
_LAUNCHES: Final = tuple(itertools.product((4, 8), (2, 3)))
# M1, N1 of the loop for keys; M2, N2 of that for queries.
_BACKWARD: Final = (
    (64, 64, 64, 64),
    (32, 64, 64, 64),
    (32, 64, 64, 32),
    (64, 128, 128, 64),
    (32, 128, 128, 32),
)


def options_to_try(spec: AttentionSpec, kernels: str, direction: str, known: Options | None) -> list[Options]:
    """The untuned first, then what an earlier tuning chose, then a grid of tiles, and switches beside those.

    Args:
        spec: what is tuned.
        kernels: ``"template"`` or ``"dflash"``.
        direction: ``"forward"`` or ``"backward"``.
        known: of an earlier tuning.
    """
    tried = {
        ("template", "forward"): _template_forward,
        ("template", "backward"): _template_backward,
        ("dflash", "forward"): _forward,
        ("dflash", "backward"): _backward,
    }[kernels, direction]
    found: list[Options] = []
    for options in ({}, *([] if known is None else [known]), *tried(spec)):
        if options not in found:
            found.append(options)
    return found


def lengths_of(spec: AttentionSpec, length_class: str) -> tuple[Lengths, ...]:
    """What is measured: a long step, a shorter one, and a batch, whole blocks or odd as the class has it."""
    # What serves all lengths is measured at both kinds.
    first = "div128" if length_class == "any" else length_class
    return (
        _fit(spec, first, 1, 8192, 4096),
        _fit(spec, length_class, 1, 4096, 4096),
        _fit(spec, length_class, 2, 2048, 4096),
    )


def checked_lengths(spec: AttentionSpec, length_class: str) -> tuple[Lengths, ...]:
    """Where results are checked besides: a short step with ends inside a tile, if the class has such."""
    return (_fit(spec, length_class, 2, 384, 640),)


def _fit(spec: AttentionSpec, length_class: str, batch: int, query: int, context: int) -> Lengths:
    """The nearest lengths that spec and class take; the key axis is the query's where nothing is drafted."""
    size, whole = spec.mask.draft_size, length_class == "div128"
    step = math.lcm(_BLOCK, size) if whole else size
    query = -(-query // step) * step
    if not whole:
        query += size if size > 1 else 17
    drafts = any(leaf.block_size for leaf in spec.mask.leaves())
    return batch, query, query + (context if whole else context + 3) if drafts else query


def _template_forward(spec: AttentionSpec) -> Iterator[Options]:
    for rows, keys in itertools.product((64, 128), (64, 128)):
        for warps, stages in _LAUNCHES:
            yield {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}
    for switch in ("PRESCALE_QK", "USE_TMA"):
        yield {switch: True}
        yield {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3, switch: True}
        yield {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 3, switch: True}


def _template_backward(spec: AttentionSpec) -> Iterator[Options]:
    names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2")
    for sizes in _BACKWARD:
        for warps, stages in _LAUNCHES:
            yield {**dict(zip(names, sizes, strict=True)), "num_warps": warps, "num_stages": stages}
    for switch in ("PRESCALE_QK", "USE_TMA"):
        yield {switch: True}
        yield {**dict(zip(names, _BACKWARD[0], strict=True)), "num_warps": 4, "num_stages": 2, switch: True}


def _forward(spec: AttentionSpec) -> Iterator[Options]:
    # Four warps multiply 64 rows at once; with eight, tiles of 64 rows took twice as long on an H200.
    for (rows, keys), stages in itertools.product(((64, 64), (64, 128), (128, 64), (64, 32)), (2, 3)):
        yield {"rows": rows, "keys": keys, "warps": rows // 16, "stages": stages}
    for keys, stages in ((128, 2), (64, 2), (64, 3), (64, 4)):
        yield {"rows": 128, "keys": keys, "warps": 4, "stages": stages, "warp_specialised": True}
    yield {"tma": False}
    for abreast in sorted({1, spec.group_size}):
        yield {"abreast": abreast}


def _backward(spec: AttentionSpec) -> Iterator[Options]:
    """Each of the two kernels while the other stays as it is."""
    for (rows, keys), stages in itertools.product(((64, 64), (64, 128), (128, 64)), (2, 3)):
        yield _named("queries", rows, keys, rows // 16, stages)
    for stages in (2, 3, 4):
        yield {**_named("queries", 128, 64, 4, stages), "queries_warp_specialised": True}
    for rows, keys in ((64, 64), (64, 128), (32, 64), (32, 128)):
        for warps, stages in _LAUNCHES:
            # Other results from run to run on an H200 with triton 3.8.0: a race, which a check may miss.
            if (warps, stages) != (8, 3):
                yield _named("keys", rows, keys, warps, stages)
    yield {"tma": False}
    yield {"queries_abreast": 1}


def _named(kernel: str, rows: int, keys: int, warps: int, stages: int) -> Options:
    sizes = {"rows": rows, "keys": keys, "warps": warps, "stages": stages}
    return {f"{kernel}_{name}": value for name, value in sizes.items()}
