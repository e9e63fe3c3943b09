"""Memory follows the visible blocks: a long step in a fresh process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
import torch, aotpack

attend = aotpack.load(sys.argv[1]).attention("full")
B, S, N = 1, 512, 512
spec, dtype = attend.spec, getattr(torch, attend.spec.dtype)

def highest():
    # Not getrusage: a child inherits its parent's highest there.
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

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
print(step(S, N) * 1024)
"""


def test_extra_memory_of_a_long_step_is_under_1_gb(float32_package: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(float32_package)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    # Dense float32 scores alone would take 4 GB.
    assert 0 < int(done.stdout) < 1e9
