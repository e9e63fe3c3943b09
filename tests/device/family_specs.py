"""Builds the package of ``cuda_families.py``: ``python tests/device/family_specs.py PACKAGE [TARGET]``."""

from __future__ import annotations

import sys

from aotpack.build import build
from aotpack.spec import AttentionSpec, MaskSpec

DOCUMENT, CAUSAL = MaskSpec(family="document"), MaskSpec(family="causal")
# Masks, head sizes and group sizes are paired so that each of them occurs, not each pair.
SPECS = {
    "eagle3-mla": AttentionSpec(
        heads=4, kv_heads=4, head_dim=192, value_dim=128, scale=0.1, dtype="bfloat16",
        mask=MaskSpec(family="eagle3"),
    ),
    "peagle-80": AttentionSpec(
        heads=8, kv_heads=2, head_dim=80, dtype="bfloat16", mask=MaskSpec(family="peagle")
    ),
    "packed-window-96": AttentionSpec(
        heads=6, kv_heads=1, head_dim=96, dtype="bfloat16",
        mask=MaskSpec(family="and", parts=(DOCUMENT, MaskSpec(family="sliding", window=50))),
    ),
    "prefix-64": AttentionSpec(
        heads=14, kv_heads=2, head_dim=64, dtype="bfloat16", mask=MaskSpec(family="prefix")
    ),
    "dflash-or-causal": AttentionSpec(
        heads=3, kv_heads=1, head_dim=64, dtype="bfloat16",
        mask=MaskSpec(family="or", parts=(MaskSpec(family="dflash", block_size=7), CAUSAL)),
    ),
    "dflash-128": AttentionSpec(
        heads=8, kv_heads=2, head_dim=128, dtype="bfloat16", mask=MaskSpec(family="dflash", block_size=16)
    ),
    "dflash-window-128": AttentionSpec(
        heads=6, kv_heads=1, head_dim=128, dtype="float16",
        mask=MaskSpec(family="dflash", block_size=10, window=150),
    ),
    "dflash-blocks-of-80": AttentionSpec(
        heads=2, kv_heads=2, head_dim=128, dtype="bfloat16",
        mask=MaskSpec(family="dflash", block_size=80, window=90),
    ),
    "dflash-64": AttentionSpec(
        heads=4, kv_heads=2, head_dim=64, dtype="bfloat16",
        mask=MaskSpec(family="dflash", block_size=7),
    ),
    "dflash-window-64": AttentionSpec(
        heads=4, kv_heads=1, head_dim=64, dtype="float16",
        mask=MaskSpec(family="dflash", block_size=16, window=40),
    ),
}  # fmt: skip

if __name__ == "__main__":
    report = build(
        SPECS,
        [sys.argv[2] if len(sys.argv) > 2 else "cuda-sm90"],
        sys.argv[1],
        progress=lambda s: s.seconds and print(s.spec, s.name, f"{s.seconds:.1f} s", flush=True),
    )
    print(f"{report.size} bytes in {report.seconds:.0f} s")
