"""Fresh starts of a trainer that fills a host: one process, a target and drafter threads on all its GPUs.

    python tests/device/host_round.py --starts 20 --rival-starts 10 --watchdog 60 [--save FOLDER]
    python tests/device/host_round.py --devices cuda:0,cuda:1 --threads 3 --only ours
    python tests/device/host_round.py --devices cpu --threads 3 --context 64 --anchors 4 --hidden 64

Every start is a process of its own with empty caches. With aotpack no compiler is on its PATH and a trace
would raise; the rival, torch.compile(flex_attention) in the same trainer (``host_trainer.py``), has its
compilers. A watchdog ends each start at its limit, with all that it started. How a start ended:

- finished: every thread trained all steps;
- failed: a thread raised, or the process ended with an error;
- died: it ended by itself, by a signal;
- hung: the watchdog ended it, and it no longer used the processor;
- unfinished: the watchdog ended it, and it still worked.

``--save`` leaves host.json and host.txt after each start and adds to a host.json with the same settings that
is there: several calls make one table. Exits 1 when a start of aotpack's own did not do all it must.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path[:0] = [str(HERE), str(ROOT / "examples"), str(ROOT)]

from host_table import FLEX, OWN, Start, missed, read, text, write  # noqa: E402
from race import Watched, innermost, last_words, watch  # noqa: E402

from aotpack.bench.protocol import environment  # noqa: E402

JOBS = {OWN: "aotpack", FLEX: "flex"}
# Beside PATH, where torch and triton look for compilers.
COMPILER_VARIABLES = ("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "TRITON_PTXAS_PATH", "PYTORCH_NVCC")


def drafter_devices(devices: Sequence[str], threads: int | None) -> list[str]:
    """The device of each drafter thread: all devices but the target's, which is taken last."""
    order = [*devices[1:], devices[0]]
    count = threads or max(1, len(devices) - 1)
    return [order[i % len(order)] for i in range(count)]


def surroundings(who: str, folder: Path) -> dict[str, str]:
    """Environment of a start: empty caches in ``folder`` and, for aotpack, nothing to compile with."""
    (folder / "tmp").mkdir()
    (folder / "bin").mkdir()
    found = {**environment(folder), "CUDA_CACHE_PATH": str(folder / "driver")}
    if who == OWN:
        found = {name: value for name, value in found.items() if name not in COMPILER_VARIABLES}
        found["PATH"] = str(folder / "bin")
    return found


def compile_caches(folder: Path) -> tuple[str, ...]:
    """In which places of compile caches and temporary files a start left a file.

    Empty folders do not count: torch's optimizers import dynamo, which makes one.
    """
    places = [folder / "inductor", folder / "driver", *sorted((folder / "tmp").iterdir())]
    return tuple(
        str(place.relative_to(folder))
        for place in places
        if any(path.is_file() for path in (place, *place.rglob("*")))
    )


def one_start(who: str, settings: Mapping[str, Any], package: Path, watchdog: float) -> Start:
    """A fresh process that trains, watched."""
    with tempfile.TemporaryDirectory(prefix="host-round-") as name:
        folder = Path(name)
        around = surroundings(who, folder)
        job = {
            **{key: settings[key] for key in (
                "spec", "target", "drafters", "rows", "context", "anchors", "hidden", "layers", "steps"
            )},
            "who": JOBS[who],
            "package": str(package.absolute()),
            "started": time.time_ns(),
        }  # fmt: skip
        command = [sys.executable, str(HERE / "host_trainer.py"), json.dumps(job)]
        watched = watch(command, watchdog, around)
        return judge(who, watched, len(settings["drafters"]), compile_caches(folder))


def judge(who: str, watched: Watched, threads: int, caches: tuple[str, ...] = ()) -> Start:
    """What a trainer's exit and its events mean."""
    events = [json.loads(line) for line in watched.lines if line.startswith("{")]
    by_name = collections.defaultdict(list)
    for event in events:
        by_name[event["event"]].append(event)
    errors = [f"{event['who'].partition(' ')[0]}: {event['error']}" for event in by_name["raised"]]
    outcome = "finished"
    if watched.code is None:
        outcome = "unfinished" if watched.busy else "hung"
    elif watched.code < 0:
        outcome = "died"
        errors.append(last_words(watched))
    elif watched.code or errors or not by_name["checked"]:
        outcome = "failed"
        errors = errors or [last_words(watched)]

    def seconds(found: list[dict[str, Any]]) -> tuple[float | None, ...]:
        known = {event["thread"]: event["seconds"] for event in found}
        return tuple(known.get(thread) for thread in range(threads))

    made, ended, checked = ((by_name[name] or [{}])[-1] for name in ("made", "ended", "checked"))
    steps = collections.Counter(event["thread"] for event in by_name["step"])
    return Start(
        who=who,
        outcome=outcome,
        seconds=round(watched.seconds, 2) if watched.code is None else ended.get("seconds", watched.seconds),
        imported_s=(by_name["imported"] or [{}])[0].get("seconds"),
        made_s=made.get("seconds"),
        loaded_s=seconds(by_name["loaded"]),
        gradients_s=seconds(by_name["gradients"]),
        first_step_s=seconds([event for event in by_name["step"] if event["step"] == 0]),
        steps=tuple(steps[thread] for thread in range(threads)),
        traces=ended.get("traces"),
        equal="losses" in checked,
        losses=tuple(checked.get("losses", ())),
        lengths=checked.get("lengths", 0),
        devices=tuple(made.get("devices", ())),
        caches=caches,
        errors=tuple(errors),
        places=tuple(innermost(watched.errors)) if watched.code is None or watched.code < 0 else (),
    )


def rounds(options: argparse.Namespace, settings: Mapping[str, Any]) -> Iterator[Start]:
    """All starts that are asked for, one after the other."""
    source = os.pathsep.join(sys.path[:3])
    # What is not measured: the disk, and the bytecode of a new checkout.
    subprocess.run(
        [sys.executable, "-c", "import host_trainer"], env={**os.environ, "PYTHONPATH": source}, check=True
    )
    counts = {OWN: options.starts, FLEX: options.rival_starts}
    for who, count in counts.items():
        if options.only in (None, {OWN: "ours", FLEX: "rival"}[who]):
            for _ in range(count):
                yield one_start(who, settings, options.package, options.watchdog)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a start depends on; starts of one table share it."""
    devices = options.devices.split(",") if options.devices else all_devices()
    inside = options.package.resolve().is_relative_to(ROOT)
    names = ("spec", "rows", "context", "anchors", "hidden", "layers", "steps", "watchdog")
    return {
        "torch": version("torch"),
        "processors": os.cpu_count(),
        "package": os.path.relpath(options.package, ROOT) if inside else options.package.name,
        "sha256": hashlib.sha256(options.package.read_bytes()).hexdigest(),
        "target": devices[0],
        "drafters": drafter_devices(devices, options.threads),
        **{name: getattr(options, name) for name in names},
    }


def all_devices() -> list[str]:
    """Every GPU of this machine, or its CPU."""
    import torch

    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--package", type=Path, default=ROOT / "artifacts" / "qwen3-8b-dflash.aotpack")
    add("--spec", default="full")
    add("--devices", help="the target's, then the drafters': cuda:0,cuda:1 (default: all GPUs, or the CPU)")
    add("--threads", type=int, help="drafter threads (default: one for each device but the target's)")
    add("--rows", type=int, default=1, help="batch size of a thread (1)")
    add("--context", type=int, default=2048, help="greatest S of a step (2048)")
    add("--anchors", type=int, default=512, help="greatest N of a step (512)")
    add("--hidden", type=int, default=1024, help="hidden size of target and drafter (1024)")
    add("--layers", type=int, default=5, help="of the drafter (5)")
    add("--steps", type=int, default=20, help="optimizer steps of a start (20)")
    add("--starts", type=int, default=20, help="fresh processes with aotpack (20)")
    add("--rival-starts", type=int, default=10, help="fresh processes with torch.compile (10)")
    add("--only", choices=("ours", "rival"))
    add("--watchdog", type=float, default=60, help="seconds until a start is ended (60)")
    add("--save", type=Path, metavar="FOLDER", help="leaves host.json and host.txt, or adds to them")
    options = parser.parse_args()
    settings = settings_of(options)
    starts = read(options.save, settings) if options.save else []
    for start in rounds(options, settings):
        starts.append(start)
        print(start.line(), flush=True)
        if options.save:
            write(options.save, settings, starts)
    print(text(settings, starts))
    wrong = missed(starts, settings["steps"])
    print("missed:", *(wrong or ["nothing"]), sep="\n  ")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
