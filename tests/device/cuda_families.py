"""Every mask family, head size and group size on a device, against dense fp64 math.

    python tests/device/cuda_families.py PACKAGE [--device cuda] [--json FILE]

``family_specs.py`` builds the package. Prints the largest relative errors, beside those of the same math in
the attention's own dtype, and exits 1 where ours is further off, where anything was traced, or where a layout
or an unroll changes a result.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import aotpack
from aotpack.dense import dense_attention
from tests.cases import NAMES, Case, exact, make_case, relative_error, run, visible_cells
from tests.masks_drawn import visible

SHAPES = [(1, 64, 1), (2, 300, 21), (3, 777, 40), (2, 1024, 64)]
# What a device's own rounding of the softmax may add to the error of dense math in the same dtype.
SLACK = 1.15


def moved(case: Case, device: torch.device) -> Case:
    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    values = {f.name: getattr(case, f.name) for f in dataclasses.fields(case)}
    return Case(
        **{
            n: {k: move(v) for k, v in value.items()} if n == "mask" else move(value)
            for n, value in values.items()
        }
    )


def errors(attend: aotpack.Attention) -> dict[str, tuple[float, float]]:
    """The largest error of each result over all shapes: ours, and dense math's in the attention's dtype."""
    worst = dict.fromkeys(NAMES, (0.0, 0.0))
    for seed, (batch, context, anchors) in enumerate(SHAPES):
        drawn = make_case(attend.spec, batch, context, anchors, seed=seed)
        cells = visible_cells(attend.spec, drawn).to(attend.device)
        case = moved(drawn, attend.device)
        right = exact(attend.spec, case, cells)
        dtype = torch.float32 if attend.spec.dtype == "float32" else getattr(torch, attend.spec.dtype)
        dense = exact(attend.spec, case, cells, dtype)
        for name, found, expected, other in zip(NAMES, run(attend, case), right, dense, strict=True):
            if found.isnan().any():
                raise SystemExit(f"{attend.name}: {name} has NaN at {batch, context, anchors}")
            ours, theirs = relative_error(found, expected), relative_error(other, expected)
            worst[name] = (max(ours, worst[name][0]), max(theirs, worst[name][1]))
    return worst


def layouts(attend: aotpack.Attention) -> list[str]:
    """Results that a layout of the same values changes: strides, offsets, one tensor twice, a broadcast."""
    case = moved(make_case(attend.spec, 2, 200, 9), attend.device)
    mask = attend.block_mask(**case.mask)
    right = run(attend, case)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    k = torch.empty(case.k.numel() + 1, dtype=case.k.dtype, device=case.k.device)[1:].view(case.k.shape)
    k = k.copy_(case.k).requires_grad_()
    v = case.v.repeat_interleave(2, 3)[..., ::2].detach().requires_grad_()
    out, lse = attend(q, k, v, mask, return_lse=True)
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    found = (out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    wrong = [n for n, one, other in zip(NAMES, found, right, strict=True) if not torch.equal(one, other)]
    q2 = case.q.clone().requires_grad_()
    attend(q2, case.k, case.v, mask).sum().backward()  # a gradient of stride 0
    ones = torch.ones_like(case.grad_out)
    q3 = case.q.clone().requires_grad_()
    attend(q3, case.k, case.v, mask).backward(ones)
    return wrong if torch.equal(q2.grad, q3.grad) else [*wrong, "stride-0 gradient"]


def unroll(attend: aotpack.Attention, steps: int = 7, query: int = 150) -> float:
    """The largest error of the gradients of an EAGLE-3 unroll, against fp64."""
    spec, device = attend.spec, attend.device
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([query, query // 2])

    def draw(heads: int, size: int) -> list[Tensor]:
        drawn = [torch.randn(2, heads, query, size, generator=generator) for _ in range(steps)]
        return [t.to(getattr(torch, spec.dtype)).to(device) for t in drawn]

    parts = [
        draw(spec.heads, spec.head_dim),
        draw(spec.kv_heads, spec.head_dim),
        draw(spec.kv_heads, spec.value_dim),
    ]
    ours = [[t.clone().requires_grad_() for t in part] for part in parts]
    right = [[t.double().requires_grad_() for t in part] for part in parts]
    for leaves, compiled in ((ours, True), (right, False)):
        total = torch.zeros((), dtype=torch.float64, device=device)
        for k in range(steps):
            real, key = (lengths - k).clamp(min=0), (k + 1) * query
            keys, values = torch.cat(leaves[1][: k + 1], 2), torch.cat(leaves[2][: k + 1], 2)
            if compiled:
                mask = attend.block_mask(lengths=real.to(device), query_len=query, context_len=key)
                out = attend(leaves[0][k], keys, values, mask)
            else:
                cells = visible(spec.mask, {"lengths": real}, query, key).to(device)
                out = dense_attention(leaves[0][k], keys, values, cells, spec.scale)[0]
            total = total + (out.double() * (k + 1)).sum()
        total.backward()
    pairs = [(a.grad, b.grad) for x, y in zip(ours, right, strict=True) for a, b in zip(x, y, strict=True)]
    return max(relative_error(a, b) for a, b in pairs if b.abs().max() > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pack = aotpack.load(options.package, options.device)
    rows: dict[str, Any] = {}
    missed = []
    for name in pack.specs:
        attend = pack.attention(name)
        found, changed = errors(attend), layouts(attend)
        rows[name] = {
            "errors": {n: {"ours": a, "dense": b} for n, (a, b) in found.items()},
            "layouts": changed,
        }
        limit = {n: max(SLACK * b, 1e-5) for n, (_, b) in found.items()}
        bad = [n for n, (a, _) in found.items() if a > limit[n]] + changed
        missed += [f"{name}: {n}" for n in bad]
        print(
            f"{name:24}" + "  ".join(f"{n} {a:.1e}/{b:.1e}" for n, (a, b) in found.items()),
            bad or "ok",
            flush=True,
        )
        if attend.spec.mask.family == "eagle3":
            rows[name]["unroll"] = error = unroll(attend)
            print(f"{'':24}seven steps: {error:.1e}", flush=True)
            missed += [f"{name}: unroll"] if error > 2e-2 else []
    traced = [m for m in ("torch._dynamo", "torch._inductor") if m in sys.modules]
    rows["traced"] = traced
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("missed: " + ", ".join(missed + traced) if missed or traced else "all within bounds")
    return 1 if missed or traced else 0


if __name__ == "__main__":
    sys.exit(main())
