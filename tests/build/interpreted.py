"""Our own attention programs on the CPU, their kernels interpreted: errors against dense fp64 math, as JSON.

    TRITON_INTERPRET=1 python -m tests.build.interpreted

Triton decides when it is imported, so this is a process of its own.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor

from aotpack.build.programs_dflash import attention_programs, block_mask_program
from aotpack.build.specialisations import ATTENTION
from aotpack.masks import family_of
from aotpack.spec import AttentionSpec, MaskSpec
from tests.cases import NAMES, Case, exact, make_case, relative_error, visible_cells


def spec(block_size: int = 16, window: int | None = None, **changes: Any) -> AttentionSpec:
    mask = MaskSpec(family="dflash", block_size=block_size, window=window)
    usual = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": "float32"}
    return AttentionSpec(mask=mask, **{**usual, **changes})


# Spec, batch, context and anchors; lengths are no multiples of the tiles of 64 unless the name says so.
CASES: dict[str, tuple[AttentionSpec, int, int, int]] = {
    "any lengths": (spec(), 2, 200, 9),
    "whole tiles": (spec(heads=2, kv_heads=1), 1, 256, 16),
    "anchors in no order": (spec(), 1, 200, 9),
    "blocks of 7": (spec(7), 1, 150, 20),
    "blocks of 80": (spec(80, heads=2), 1, 70, 3),
    "a window inside a tile": (spec(window=50), 1, 150, 9),
    "a window of tiles": (spec(window=190, heads=2), 1, 400, 12),
    "a window, anchors in no order": (spec(window=100, heads=2), 1, 300, 9),
    "a window and blocks of 80": (spec(80, window=90, heads=2), 1, 150, 3),
    "one block": (spec(), 2, 5, 1),
    "nothing kept": (spec(heads=2), 1, 90, 6),
    "scores that grow": (spec(heads=2), 1, 250, 6),
    "heads of 128": (spec(heads=2, head_dim=128), 1, 130, 6),
    "half precision": (spec(heads=2, dtype="float16"), 1, 130, 6),
}


# The same with kernel options of a tuning.
TUNED: dict[str, tuple[str, dict[str, dict[str, int]]]] = {
    "other tiles": (
        "any lengths",
        {
            "forward": {"rows": 128, "keys": 32, "stages": 3, "abreast": 2},
            "backward": {"queries_rows": 128, "queries_keys": 32, "queries_abreast": 4, "keys_rows": 32},
        },
    ),
    "other tiles and a window": (
        "a window inside a tile",
        {"forward": {"rows": 32, "keys": 128}, "backward": {"keys_rows": 16, "keys_keys": 128}},
    ),
    "without descriptors": ("any lengths", {"forward": {"tma": False}, "backward": {"tma": False}}),
}


def run(case: Case, spec: AttentionSpec, tuned: dict[str, dict[str, int]]) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv of the programs' modules."""
    anchors, keep, context = (case.mask[n] for n in ("anchors", "keep", "context_len"))
    assert [given.name for given in family_of(spec.mask).inputs] == ["anchors", "keep"]
    (ends,) = block_mask_program(spec).module(anchors, keep, torch.empty(1).expand(context))
    forward, backward = (each.program.module for each in attention_programs(spec, ATTENTION[-1], tuned))
    out, lse = forward(case.q, case.k, case.v, ends)
    grad_lse = torch.where(lse.isfinite(), case.grad_lse, torch.nan)  # which nobody may read
    return (out, lse, *backward(case.q, case.k, case.v, ends, out, lse, case.grad_out, grad_lse))


def errors(name: str, tuned: dict[str, dict[str, int]] | None = None) -> dict[str, float]:
    made, batch, context, anchors = CASES[name]
    case = make_case(made, batch, context, anchors, keep=0.0 if name == "nothing kept" else 0.8)
    if name.endswith("no order"):
        case.mask["anchors"] = case.mask["anchors"].flip(-1).roll(3, -1)
    if name == "scores that grow":
        case.k.mul_(torch.linspace(1, 8, case.k.shape[2])[:, None])
    expected = exact(made, case, visible_cells(made, case))
    return dict(zip(NAMES, map(relative_error, run(case, made, tuned or {}), expected), strict=True))


if __name__ == "__main__":
    found = {name: errors(name) for name in CASES}
    json.dump(found | {name: errors(*tuned) for name, tuned in TUNED.items()}, sys.stdout)
