"""Memory follows the visible blocks: long steps, each in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HIGHEST = """
def highest():
    # Not getrusage: a child inherits its parent's highest there.
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""

STEP = """
import sys
import torch, aotpack

attend = aotpack.load(sys.argv[1]).attention("full")
B, S, N = 1, 512, 512
spec, dtype = attend.spec, getattr(torch, attend.spec.dtype)

def step(S, N):
    q = torch.randn(B, spec.heads, N * 16, spec.head_dim, dtype=dtype, requires_grad=True)
    k = torch.randn(B, spec.kv_heads, S + N * 16, spec.head_dim, dtype=dtype, requires_grad=True)
    v = torch.randn(B, spec.kv_heads, S + N * 16, spec.value_dim, dtype=dtype, requires_grad=True)
    anchors = torch.randint(0, S, (B, N)).sort(-1).values
    keep = torch.ones(B, N, dtype=torch.bool)
    before = highest()
    attend(q, k, v, attend.block_mask(anchors=anchors, keep=keep, context_len=S)).sum().backward()
    return highest() - before

step(64, 2)
print(step(S, N))
"""

# 2.8 * 10**9 cells, more than 32 bits count. Anchors are unsorted, and every tenth token is padding.
MASK = """
import json, sys
import torch, aotpack

T, N, SIZE, WINDOW = 8192, 3072, 16, 2048
attend = aotpack.load(sys.argv[1]).attention("speculators-2048")
generator = torch.Generator().manual_seed(0)
documents = torch.randint(0, 6, (T,), generator=generator).sort().values
documents[torch.rand(T, generator=generator) < 0.1] = -1
anchors = torch.randint(0, T, (N,), generator=generator)

def build(T, N):
    return attend.block_mask(anchors=anchors[:N] % T, document_ids=documents[:T].contiguous(), context_len=T)

build(300, 10)
before = highest()
mask = build(T, N)
extra = highest() - before

def cells(q):
    # One row of the rule as MASKS.md has it: bool [T + N * SIZE].
    a = int(anchors[q // SIZE])
    kv = torch.arange(T)
    base = (documents == documents[a]) & (documents[a] != -1) & (kv < a) & (kv >= a - WINDOW)
    draft = torch.arange(N * SIZE)
    return torch.cat([base, (draft // SIZE == q // SIZE) & (draft <= q)])

num, idx, full_num, full_idx, q_num, q_idx, full_q_num, full_q_idx, tiles, ids = mask.tensors
rows = torch.randperm(N * SIZE // 128, generator=generator)[:24].tolist() + [0, N * SIZE // 128 - 1]
wrong = 0
for row in rows:
    right = torch.stack([cells(q) for q in range(row * 128, row * 128 + 128)]).unflatten(1, (-1, 128))
    count = right.sum((0, 2))
    partial = ((count > 0) & (count < 128 * 128)).nonzero().flatten().tolist()
    full = (count == 128 * 128).nonzero().flatten().tolist()
    wrong += idx[0, 0, row, : num[0, 0, row]].tolist() != partial
    wrong += full_idx[0, 0, row, : full_num[0, 0, row]].tolist() != full
    for column in partial:
        tile = tiles[int(ids[0, 0, row, column])]
        bits = (tile[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).reshape(128, 128).bool()
        wrong += not torch.equal(bits, right[:, column])
        wrong += row not in q_idx[0, 0, column, : q_num[0, 0, column]].tolist()
    for column in full:
        wrong += row not in full_q_idx[0, 0, column, : full_q_num[0, 0, column]].tolist()
wrong += int(q_num.sum()) != int(num.sum()) or int(full_q_num.sum()) != int(full_num.sum())
wrong += len(tiles) != int(num.sum())
print(json.dumps({"extra": extra, "wrong": wrong, "tiles": len(tiles), "full": int(full_num.sum())}))
"""

# The same size as a torch BlockMask of 64x256 blocks, all of a band partial.
ADOPTED = """
import sys
import torch
from torch.nn.attention.flex_attention import BlockMask
from aotpack.runtime.torch_mask import adopt

def band(Q, KV):
    rows, columns, width = Q // 64, KV // 256, 8
    first = (torch.arange(rows) * columns // rows).clamp(max=columns - width)
    indices = (first[:, None] + torch.arange(width)).to(torch.int32)[None, None]
    counts = torch.full((1, 1, rows), width, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(
        counts, indices, BLOCK_SIZE=(64, 256), mask_mod=lambda b, h, q, kv: (q + kv) % 2 == 0,
        seq_lengths=(Q, KV), compute_q_blocks=False,
    )
    return adopt(mask, torch.empty(1, 1, Q, 1), torch.empty(1, 1, KV, 1))

band(1024, 4096)
before = highest()
mask = band(49152, 57344)
assert len(mask.tensors[-2]) > 6000
print(highest() - before)
"""


def measured(script: str, *arguments: object) -> Any:
    """What a script prints, as JSON, in a process of its own."""
    command = [sys.executable, "-c", HIGHEST + script, *map(str, arguments)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, timeout=500, check=True).stdout)


def test_extra_memory_of_a_long_step_is_under_1_gb(float32_package: Path) -> None:
    # Dense float32 scores alone would take 4 GB.
    assert 0 < measured(STEP, float32_package) < 1e9


def test_a_packed_mask_of_3072_anchors_takes_under_100_mb(masks_package: Path) -> None:
    found = measured(MASK, masks_package)
    assert found["wrong"] == 0
    assert found["tiles"] > 10_000
    # A byte for each cell of the grid would take 2.8 GB, and one for each cell of the partial blocks 200 MB.
    assert 0 < found["extra"] < 100e6


def test_a_torch_mask_is_taken_row_by_row() -> None:
    assert 0 < measured(ADOPTED) < 150e6
