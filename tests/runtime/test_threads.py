"""Threads: the same bits as one thread, whatever else the process traces, and no memory left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import aotpack
from tests.cases import Case, make_case, run

THREADS, ROUNDS = 8, 50
REPLACED = {name: vars(torch.nn.Module)[name] for name in ("__call__", "__getattr__")}


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class _Noise:
    """Threads that trace and compile unrelated functions until the block ends."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.rounds = [0, 0]
        self.failures: list[Exception] = []
        self.threads = [threading.Thread(target=self._loop, args=(i,)) for i in range(2)]

    def _loop(self, kind: int) -> None:
        def unrelated(x: torch.Tensor) -> torch.Tensor:
            return x.sin() + self.rounds[kind]

        make: Callable[[], object] = (
            (lambda: torch.fx.symbolic_trace(lambda x: x.sin() + 1))
            if kind == 0
            else (lambda: torch.compile(unrelated, backend="eager")(torch.ones(self.rounds[1] % 7 + 1)))
        )
        while not self.stop.is_set():
            try:
                make()
            except Exception as error:  # noqa: BLE001 - only how many there were matters
                self.failures.append(error)
            self.rounds[kind] += 1
            if kind == 1:
                torch._dynamo.reset()

    def __enter__(self) -> _Noise:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join()
        # A trace replaces these while it lasts; of two at once the second takes the first one's for torch's,
        # and may leave them in the process for good, where every later call of a module would fail.
        for name, own in REPLACED.items():
            setattr(torch.nn.Module, name, own)


def _cases(attention: aotpack.Attention) -> list[Case]:
    return [make_case(attention.spec, 1 + i % 3, 20 + 41 * i, 1 + 3 * i, seed=i) for i in range(6)]


def test_eight_threads_give_the_bits_of_one_while_others_trace(dflash_pack: aotpack.Pack) -> None:
    attention = dflash_pack.attention("full")
    cases = _cases(attention)
    torch.set_num_threads(1)
    alone = [run(attention, case) for case in cases]
    torch.set_num_threads(2)
    with_two = [run(attention, case) for case in cases]

    def work(thread: int) -> int:
        torch.set_num_threads(1 + thread % 2)
        wrong = 0
        for turn in range(ROUNDS):
            place = (turn + thread) % len(cases)
            found = run(attention, cases[place])
            wrong += not all(torch.equal(a, b) for a, b in zip(found, alone[place], strict=True))
        return wrong

    with _Noise() as noise, ThreadPoolExecutor(THREADS) as pool:
        wrong = list(pool.map(work, range(THREADS)))
    assert wrong == [0] * THREADS
    assert all(
        torch.equal(a, b) for x, y in zip(alone, with_two, strict=True) for a, b in zip(x, y, strict=True)
    )
    assert min(noise.rounds) > 0


@pytest.mark.parametrize("calls", [2000])
def test_memory_is_flat_over_many_calls(dflash_pack: aotpack.Pack, calls: int) -> None:
    attention = dflash_pack.attention("full")
    case = make_case(attention.spec, 1, 100, 8)
    torch.set_num_threads(1)
    for _ in range(200):
        run(attention, case)
    before = _resident()
    for _ in range(calls):
        run(attention, case)
    # One output leaked a call would be 450 MB.
    assert _resident() - before < 20e6
