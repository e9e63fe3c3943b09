from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.conftest import build_once
from tests.integrations.models import package_specs

PATH = Path(__file__).parents[2] / "examples" / "hf_finetune.py"


def run(*options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PATH, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_it_learns_and_nothing_is_traced(built):
    # The package of the tiny models holds what this one needs: the sizes are the same.
    package = build_once(built, "transformers", package_specs(every=False))
    done = run("--package", package, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == "aotpack.example.finetune/1"
    assert data["traces"] == 0
    assert len(data["losses"]) == done.stderr.count("loss") == 30
    assert data["losses"][-1] < 0.7 * data["losses"][0]


def test_a_package_of_another_model_is_an_error_of_ours(dflash_package):
    done = run("--package", dflash_package)
    assert done.returncode == 3
    assert "the package was built for another attention" in done.stderr
    assert "Traceback" not in done.stderr
