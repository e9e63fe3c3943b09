"""The torchrun example as users run it: real processes, and one process with the same data."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "examples" / "train_dflash_torchrun.py"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(command: list[str], *options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, PATH, *map(str, options)], env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip


def result(command: list[str], *options: object) -> dict[str, Any]:
    done = run(command, *options, "--steps", 4, "--device", "cpu", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["schema"] == "aotpack.example.torchrun/1"
    assert (found["traces"], len(found["losses"]), found["shards"]) == (0, 4, 2)
    return found


@pytest.fixture(scope="module")
def alone(dflash_package: Path) -> dict[str, Any]:
    """One process with the data of two."""
    return result([sys.executable], "--package", dflash_package, "--shards", 2)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_processes_have_the_losses_of_one(alone, dflash_package, strategy):
    found = result(TORCHRUN, "--package", dflash_package, "--strategy", strategy)
    assert (found["processes"], len(found["first_step_s"])) == (2, 2)
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    # Two layers a step: a process has half of the calls of one that does all.
    assert 2 * found["calls"] == alone["calls"] == 2 * 2 * 4


def test_losses_fall_and_depend_on_the_data(alone, dflash_package):
    assert alone["losses"][-1] < 0.9 * alone["losses"][0]
    other = run([sys.executable], "--package", dflash_package, "--steps", 1, "--device", "cpu", "--json")
    assert json.loads(other.stdout)["losses"][0] != pytest.approx(alone["losses"][0], rel=1e-5)


def test_a_package_that_is_not_there_ends_all_processes(tmp_path):
    done = run(TORCHRUN, "--package", tmp_path / "missing.aotpack", "--device", "cpu")
    assert done.returncode != 0
    assert "missing.aotpack" in done.stderr
    assert "rank 0 failed in aotpack.integrations.distributed.load" in done.stderr
