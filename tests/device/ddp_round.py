"""DDP and FSDP2 on two GPUs with NCCL: losses equal one process with the same data.

    python tests/device/ddp_round.py PACKAGE [--processes 2] [--steps 20]

Runs examples/train_dflash_torchrun.py on one GPU with all shards, then under torchrun, one GPU each. Prints a
table; exits 1 where losses differ, something is traced, or first steps differ by more than a second.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_dflash_torchrun.py"
# Of a loss. Sums on a GPU have no fixed order, and AdamW's first steps follow signs of small gradients.
TOLERANCE = 0.01
SPREAD_S = 1.0


def run(command: list[str], strategy: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = [
        "--package",
        options.package,
        "--strategy",
        strategy,
        "--steps",
        str(options.steps),
        "--json",
    ]
    command = [*command, str(EXAMPLE), *arguments, "--shards", str(options.processes)]
    source = f"{EXAMPLE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": source}, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def row(name: str, found: dict[str, Any], losses: list[float]) -> tuple[str, list[str]]:
    """A line of the table, and what was missed."""
    first = found["first_step_s"]
    off = max(abs(a - b) / b for a, b in zip(found["losses"], losses, strict=True))
    spread = max(first) - min(first)
    missed = [
        f"{name}: {what}"
        for wrong, what in (
            (off > TOLERANCE, f"losses differ by {off:.2%}"),
            (spread > SPREAD_S, f"first steps differ by {spread:.2f} s"),
            (found["traces"] != 0, f"{found['traces']} traces"),
            (not found["device"].startswith("cuda"), f"it ran on {found['device']}"),
        )
        if wrong
    ]
    times = " ".join(f"{seconds:.3f}" for seconds in first)
    line = (
        f"{name:12} {found['processes']:>9} {found['losses'][0]:>7.4f} {found['losses'][-1]:>7.4f} "
        f"{off:>9.2e} {found['load_s']:>7.3f}  {times}"
    )
    return line, missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    torchrun = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.processes}"
    ]  # fmt: skip
    one = run([sys.executable], "ddp", options)
    print("strategy     processes   first    last off by     load_s  first step of each rank, s")
    missed = []
    for name, found in (
        ("one process", one),
        ("ddp", run(torchrun, "ddp", options)),
        ("fsdp2", run(torchrun, "fsdp2", options)),
    ):
        line, wrong = row(name, found, one["losses"])
        print(line, flush=True)
        missed += wrong
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
