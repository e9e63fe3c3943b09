from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PATH = Path(__file__).parents[2] / "examples" / "train_dflash_threads.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PATH, *map(str, options)], capture_output=True, text=True, timeout=300, check=False
    )


def test_three_threads_learn_and_nothing_is_traced(dflash_package):
    done = run("--package", dflash_package, "--steps", 10, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == "aotpack.example.train/1"
    assert (data["threads"], data["devices"], data["traces"]) == (3, ["cpu"] * 3, 0)
    assert data["last_loss"] <= 0.7 * data["first_loss"]
    assert len(data["losses"]) == done.stderr.count("loss") == 10


def test_a_package_that_is_not_there_is_an_error_of_ours(tmp_path):
    done = run("--package", tmp_path / "missing.aotpack")
    assert done.returncode == 2
    assert "missing.aotpack" in done.stderr
    assert "Traceback" not in done.stderr
