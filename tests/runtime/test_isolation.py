"""A fresh process that may not trace, compile or start a compiler still trains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotpack.package import Package
from aotpack.trust import generate_key_pair, read_private_key, sign

SCRIPT = """
import builtins, os, subprocess, sys
import torch

allowed = set(sys.modules)
BLOCKED = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.export")
if any(name.startswith(BLOCKED[:2]) for name in allowed):
    sys.exit("import torch itself brought dynamo or inductor")

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in BLOCKED) and name not in allowed:
            raise ImportError(f"blocked: {name}")

sys.meta_path.insert(0, Blocker())
os.environ["PATH"] = ""

def refuse(*a, **k):
    raise RuntimeError("a process was started")

subprocess.Popen.__init__ = refuse
os.system = os.posix_spawn = os.fork = refuse

import aotpack
pack = aotpack.load(sys.argv[1])
attend = pack.attention("full")
spec = attend.spec
B, S, N = 2, 100, 5
dtype = getattr(torch, spec.dtype)
q = torch.randn(B, spec.heads, N * 16, spec.head_dim, dtype=dtype, requires_grad=True)
k = torch.randn(B, spec.kv_heads, S + N * 16, spec.head_dim, dtype=dtype, requires_grad=True)
v = torch.randn(B, spec.kv_heads, S + N * 16, spec.value_dim, dtype=dtype, requires_grad=True)
anchors, keep = torch.randint(0, S, (B, N)), torch.ones(B, N, dtype=torch.bool)
mask = attend.block_mask(anchors=anchors, keep=keep, context_len=S)

def step():
    out, lse = attend(q, k, v, mask, return_lse=True)
    (out.float().sum() + lse.sum()).backward()

import threading
failures = []
def guarded():
    try:
        step()
    except BaseException as error:
        failures.append(error)
thread = threading.Thread(target=guarded)
thread.start(); thread.join()
step()
if failures:
    raise failures[0]
assert q.grad.isfinite().all() and k.grad.abs().sum() > 0
new = sorted(n for n in set(sys.modules) - allowed if n.startswith(BLOCKED))
assert not new, new
print("trained", torch.__version__)
"""


def _train(python: str, package: Path, tmp_path: Path, **environment: str) -> str:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [python, str(script), str(package)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_training_without_tracers_and_compilers(dflash_package: Path, tmp_path: Path) -> None:
    assert "trained" in _train(sys.executable, dflash_package, tmp_path)


@pytest.fixture
def oldest_python() -> str:
    python = os.environ.get("AOTPACK_TEST_TORCH211")
    if not python:
        pytest.skip("AOTPACK_TEST_TORCH211 names no interpreter with torch 2.11.0; .ci/run makes one")
    return python


def test_the_oldest_torch_runs_what_the_newest_built(
    dflash_package: Path, tmp_path: Path, oldest_python: str
) -> None:
    source = str(Path(__file__).parents[2])
    said = _train(
        oldest_python, dflash_package, tmp_path, PYTHONPATH=source, AOTPACK_CACHE=str(tmp_path / "cache")
    )
    assert said.startswith("trained 2.11.0")


def test_the_oldest_torch_takes_a_package_and_its_signature(
    dflash_package: Path, tmp_path: Path, oldest_python: str
) -> None:
    shutil.copy(dflash_package, tmp_path / "signed.aotpack")
    generate_key_pair(tmp_path / "release.key")
    with Package.open(tmp_path / "signed.aotpack") as package:
        digest = package.digest
    sign(tmp_path / "signed.aotpack", digest, read_private_key(tmp_path / "release.key"))
    script = (
        "import sys, aotpack, torch\n"
        "from aotpack.trust import trusted_keys\n"
        "pack = aotpack.load(sys.argv[1], trust=trusted_keys(sys.argv[2]))\n"
        "print(pack.digest, torch.__version__)\n"
    )
    for python in (sys.executable, oldest_python):
        done = subprocess.run(
            [python, "-c", script, str(tmp_path / "signed.aotpack"), str(tmp_path / "release.key.pub")],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "AOTPACK_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout.startswith(digest), done.stderr
    assert "2.11.0" in done.stdout


def test_the_oldest_torch_agrees_with_fp64(
    masks_package: Path, dflash_package: Path, float32_package: Path, oldest_python: str
) -> None:
    source = Path(__file__).parents[2]
    done = subprocess.run(
        [
            oldest_python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "tests/runtime/test_numerics.py",
            "-k",
            "not 777",
        ],
        cwd=source,
        env={
            **os.environ,
            "PYTHONPATH": str(source),
            "AOTPACK_TEST_PACKAGES": str(masks_package.parent),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
