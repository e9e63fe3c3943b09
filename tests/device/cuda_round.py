"""A whole round on a CUDA machine, one step after the other, each with a time limit of its own.

    python tests/device/cuda_round.py --package P [--exact X] [--artifact A] [--steps ...] [--out FOLDER]

Packages are built without a GPU:

    aotpack build examples/qwen3-8b-dflash/config.json --target cuda-sm90 -o P

P may hold more specs than ``full``; X has the shapes of ``cuda_attention.EXACT`` as well (``--shape``); A is
``artifacts/qwen3-8b-dflash.aotpack``. ``bench`` runs ``aotpack bench all`` on A, ``bench-step`` and the like
one of them; figures are left in FOLDER/bench, pictures in FOLDER. ``tune`` measures what ``aotpack build
--tune --candidates`` left and writes FOLDER/tuning.json. Exits 1 when a step missed a bound, failed or did
not end.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
BENCHES = ("mask", "step", "memory", "overhead", "size", "scaling", "train", "coldstart")


def steps(options: argparse.Namespace) -> Mapping[str, tuple[int, list[str]]]:
    """Seconds and command of each step."""
    attention, threads = str(HERE / "cuda_attention.py"), str(HERE / "cuda_threads.py")
    package, out = str(options.package), options.out
    exact = ["--exact", str(options.exact)] if options.exact else []
    bench = ["-m", "aotpack", "bench"]
    measured = [
        "--device",
        "cuda",
        "--package",
        str(options.artifact),
        "--repeat",
        str(options.repeat),
        "--json",
    ]
    kept = ["--spec", "full", "--timeout", str(options.timeout), "--save", str(out / "bench"), "--plot"]
    tune = ["-m", "aotpack", "tune", str(options.candidates), "-o", str(out / "tuning.json")]
    train = str(ROOT / "examples" / "train_dflash_threads.py")
    return {
        "selftest": (60, ["-m", "aotpack", "selftest", package, "--device", "cuda"]),
        "correct": (240, [attention, "correct", package, "--json", str(out / "correct.json")]),
        "exact": (240, [attention, "correct", str(options.exact), "--json", str(out / "exact.json")]),
        "speed": (240, [attention, "speed", package, *exact, "--json", str(out / "speed.json")]),
        "tune": (570, [*tune, "--device", "cuda"]),
        "coldstart": (120 * options.repeat, [*bench, "coldstart", *measured]),
        **{
            f"bench-{name}": (570, [*bench, name, *measured, *kept, str(out / f"bench-{name}.png")])
            for name in BENCHES
        },
        "bench": (1700, [*bench, "all", *measured, *kept, str(out / "bench.png")]),
        "train": (200, [train, "--package", str(options.artifact), "--device", "cuda", "--threads", "3"]),
        "threads": (300, [threads, package]),
        "rival": (90, [threads, package, "--rival", "20"]),
    }


def run(name: str, limit: int, command: list[str], out: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    if name == "train":
        # Nothing to compile with: no gcc, nvcc or ptxas is found.
        environment["PATH"] = ""
    start = time.monotonic()
    with (out / f"{name}.log").open("wb") as log:
        try:
            code: int | str = subprocess.run(
                [sys.executable, *command], env=environment, stdout=log, stderr=subprocess.STDOUT,
                timeout=limit, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = f"not done after {limit} s"
    result = "ok" if code == 0 else f"FAILED ({code})"
    return f"{name}: {result}, {time.monotonic() - start:.0f} s"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--exact", type=Path)
    parser.add_argument("--artifact", type=Path, default=ROOT / "artifacts" / "qwen3-8b-dflash.aotpack")
    parser.add_argument("--steps", default="selftest,correct,speed,coldstart,train,threads,rival")
    parser.add_argument("--repeat", type=int, default=5, help="of the cold starts and benches")
    parser.add_argument("--candidates", type=Path, help="a folder of them, for tune")
    parser.add_argument(
        "--timeout", type=int, default=200, help="of a rival; create_block_mask took 240 s to compile"
    )
    parser.add_argument("--out", type=Path, default=Path("round"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    known, summary = steps(options), []
    for name in options.steps.split(","):
        summary.append(run(name, *known[name], options.out))
        print(f"== {summary[-1]}", flush=True)
        print("\n".join((options.out / f"{name}.log").read_text(errors="replace").splitlines()[-45:]))
    print("\n".join(summary))
    return int(any("FAILED" in line for line in summary))


if __name__ == "__main__":
    sys.exit(main())
