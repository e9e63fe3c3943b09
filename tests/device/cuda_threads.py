"""Threads over every CUDA device of the machine: same bits as one thread, nothing on the wrong device.

    python tests/device/cuda_threads.py PACKAGE [--threads 8] [--rounds 200]
    python tests/device/cuda_threads.py PACKAGE --rival 20

A further thread compiles unrelated functions with torch.compile the whole time. Then: streams of the caller,
CUDA graph capture, and flat memory. Exits 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from cuda_attention import case, gradients, rival_of

import aotpack

STEPS = [(1, 4096, 512), (2, 777, 131), (3, 1500, 7), (1, 64, 1), (1, 1024, 128), (1, 1000, 64)]
Bits = tuple[torch.Tensor, ...]


def step(attend: aotpack.Attention, made: dict[str, Any]) -> Bits:
    mask = attend.block_mask(**made["mask"])
    return gradients(lambda q, k, v: attend(q, k, v, mask, return_lse=True), made)


class Compiling:
    """A thread that compiles unrelated functions until the block ends, each of them new to torch."""

    def __init__(self) -> None:
        self.stop, self.count, self.failed = threading.Event(), 0, 0
        self.thread = threading.Thread(target=self._loop)
        self.folder = tempfile.TemporaryDirectory()
        self._compile()  # imports the compiler, which takes seconds

    def _compile(self) -> None:
        source = f"def unrelated(x):\n    return (x.sin() * {self.count} + 1).cos().sum()"
        names: dict[str, Any] = {}
        # In a file of its own: all functions without one count as recompilations of one, and end after eight.
        path = Path(self.folder.name, f"unrelated_{self.count}.py")
        path.write_text(source)
        exec(compile(source, str(path), "exec"), names)
        try:
            torch.compile(names["unrelated"])(torch.ones(64, device="cuda:0"))
        except Exception:  # noqa: BLE001 - torch's own failures are only counted
            self.failed += 1
        self.count += 1

    def _loop(self) -> None:
        while not self.stop.is_set():
            self._compile()

    def __enter__(self) -> Compiling:
        self.thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop.set()
        self.thread.join()
        self.folder.cleanup()


def storm(package: Path, devices: list[torch.device], threads: int, rounds: int) -> list[str]:
    packs = [aotpack.load(package, device) for device in devices]
    attends = [pack.attention("full") for pack in packs]
    cases = [[case(attend, *shape, keep_all=False) for shape in STEPS] for attend in attends]
    alone = [[step(a, made) for made in mine] for a, mine in zip(attends, cases, strict=True)]
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = [torch.cuda.memory_allocated(device) for device in devices]

    def work(number: int) -> int:
        place, wrong = number % len(devices), 0
        stream = torch.cuda.Stream(devices[place])
        # The current device stays cuda:0 in every thread: a program must find its own.
        with torch.cuda.stream(stream):
            torch.cuda.set_device(0)
            with torch.cuda.stream(stream):
                for turn in range(rounds):
                    at = (turn + number) % len(STEPS)
                    found = step(attends[place], cases[place][at])
                    wrong += not all(torch.equal(a, b) for a, b in zip(found, alone[place][at], strict=True))
                    wrong += any(t.device != devices[place] for t in found)
        return wrong

    start = time.perf_counter()
    with Compiling() as other, ThreadPoolExecutor(threads) as pool:
        wrong = list(pool.map(work, range(threads)))
    for device in devices:
        torch.cuda.synchronize(device)
    grown = [torch.cuda.memory_allocated(d) - b for d, b in zip(devices, before, strict=True)]
    print(
        f"{threads} threads x {rounds} on {len(devices)} devices: {time.perf_counter() - start:.1f} s, "
        f"wrong {wrong}, allocated since {grown}, other compiled {other.count} ({other.failed} failed)",
        flush=True,
    )
    missed = [f"thread {n} had {w} wrong results" for n, w in enumerate(wrong) if w]
    return missed + [f"{d} grew by {g} bytes" for d, g in zip(devices, grown, strict=True) if g > 1 << 20]


def rival(package: Path, threads: int, seconds: float) -> dict[str, Any]:
    """Threads that call torch.compile(flex_attention), compiled before, while another thread compiles."""
    attend = aotpack.load(package, "cuda:0").attention("full")
    made = case(attend, 1, 1024, 128, keep_all=True)
    call = rival_of(attend, made, dynamic=False)
    gradients(call, made)
    failures: collections.Counter[str] = collections.Counter()
    done = [0] * threads
    end = time.monotonic() + seconds

    def work(number: int) -> None:
        while time.monotonic() < end:
            try:
                gradients(call, made)
                done[number] += 1
            except Exception as error:  # noqa: BLE001
                failures[" ".join(str(error).split())[:90]] += 1

    with Compiling() as other, ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))
    return {"calls": sum(done), "failures": dict(failures), "compiled": other.count}


def own_device_only(package: Path, device: torch.device) -> list[str]:
    others = [torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != device.index]
    before = [torch.cuda.memory_reserved(other) for other in others]
    attend = aotpack.load(package, device).attention("full")
    step(attend, case(attend, 1, 1024, 128, keep_all=True))
    grown = [torch.cuda.memory_reserved(o) - b for o, b in zip(others, before, strict=True)]
    print(f"a step on {device} reserved on the others: {grown}", flush=True)
    return [f"{g} bytes on {o}" for o, g in zip(others, grown, strict=True) if g]


def captured(package: Path, device: torch.device) -> list[str]:
    """One step captured in a CUDA graph after one warm-up, replayed with other values."""
    attend = aotpack.load(package, device).attention("full")
    made = case(attend, 1, 1024, 128, keep_all=True)
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()
        inputs = {n: made[n].clone().requires_grad_() for n in "qkv"}

        def run() -> Bits:
            mask = attend.block_mask(**made["mask"])
            out, lse = attend(*inputs.values(), mask, return_lse=True)
            grads = torch.autograd.grad(
                [out, lse], list(inputs.values()), [made["grad_out"], made["grad_lse"]]
            )
            return (out, lse, *grads)

        with torch.cuda.stream(stream):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            found = run()
        with torch.no_grad():
            inputs["q"].copy_(inputs["q"].flip(2))
        graph.replay()
        torch.cuda.synchronize()
        right = run()
        torch.cuda.synchronize()
    same = all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    print(f"CUDA graph replay equals eager: {same}", flush=True)
    return [] if same else ["CUDA graph replay differs"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--rival", type=float, help="torch.compile instead, for this many seconds")
    options = parser.parse_args()
    if options.rival:
        print(rival(options.package, options.threads, options.rival), flush=True)
        return 0
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    missed = own_device_only(options.package, devices[-1])
    missed += captured(options.package, devices[-1])
    missed += storm(options.package, devices, options.threads, options.rounds)
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
