"""Examples as users run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import EXAMPLES

__all__ = ["check_it_builds_once", "run_example"]


def run_example(name: str, *options: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs an example in a folder."""
    command = [sys.executable, EXAMPLES / name, *map(str, options)]
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def check_it_builds_once(name: str, folder: Path) -> None:
    """Asserts that an example builds its package in a folder, and a second run takes it."""
    first = run_example(name, cwd=folder)
    assert first.returncode == 0, first.stderr
    assert "traces       0\n" in first.stdout
    (package,) = folder.glob("*.aotpack")
    built = package.stat().st_mtime_ns
    again = run_example(name, "--steps", 1, cwd=folder)
    assert again.returncode == 0, again.stderr
    assert package.stat().st_mtime_ns == built
