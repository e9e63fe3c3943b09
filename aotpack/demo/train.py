"""Drafter threads in one process: a replica and a batch each, gradients averaged every step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

import torch
from torch import Tensor

from aotpack.demo.averaging import GradientMean, check_equal
from aotpack.demo.data import Batch, Corpus, sample_anchors
from aotpack.demo.drafter import Attend, Drafter, Target, drafter_config, drafting_loss, target_layer_ids
from aotpack.errors import InputError

__all__ = ["STEPS", "Loss", "Settings", "TrainResult", "train", "train_threads"]

STEPS: Final = 40

Loss = Callable[[Drafter, Target, Attend, Batch, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Sizes of the small model and of its steps; heads and block size come from the package's spec.

    Attributes:
        hidden_size: of target and drafter.
        layers: of the drafter.
        target_layers: of the target.
        rows: batch size of a thread.
        context: least and greatest context length of a step, in tokens.
        anchors: least and greatest number of anchors of a step.
        learning_rate: of AdamW.
        seed: of weights, batches, lengths and anchors.
    """

    hidden_size: int = 256
    layers: int = 2
    target_layers: int = 6
    rows: int = 2
    context: tuple[int, int] = (128, 384)
    anchors: tuple[int, int] = (16, 48)
    learning_rate: float = 1e-3
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What a training run did.

    Attributes:
        losses: of each step, the mean over the threads.
        first_loss: mean of the first three steps.
        last_loss: mean of the last three steps.
        load_ms: ``aotpack.load`` and ``pack.attention`` on the first device; 0 when given loaded attention.
        first_step_ms: first forward, backward and gradient average, from the slowest thread's start.
        seconds: of all steps, wall clock.
        cpu_seconds: of all steps, CPU time of the whole process.
        threads: drafter threads.
        devices: of each thread.
    """

    losses: tuple[float, ...]
    first_loss: float
    last_loss: float
    load_ms: float
    first_step_ms: float
    seconds: float
    cpu_seconds: float
    threads: int
    devices: tuple[str, ...]

    @property
    def fall(self) -> float:
        """Share of the first loss that training removed."""
        return 1 - self.last_loss / self.first_loss


def train(
    pack_path: str | os.PathLike[str],
    threads: int = 3,
    steps: int = STEPS,
    devices: Sequence[str] = ("cpu",),
    on_step: Callable[[int, float], None] | None = None,
    *,
    settings: Settings | None = None,
    loss: Loss = drafting_loss,
) -> TrainResult:
    """Train on a package.

    Args:
        pack_path: a package with the spec "full".
        threads: drafter threads; thread i takes device ``devices[i % len(devices)]``.
        steps: optimizer steps.
        devices: torch device names.
        on_step: called with the step's number and loss, by one thread at a time.
        settings: model and step sizes.
        loss: of one thread's step.
    """
    import aotpack

    loaded: dict[str, Attend] = {}
    load_ms = 0.0
    for device in dict.fromkeys(devices):
        start = time.perf_counter()
        loaded[device] = aotpack.load(Path(pack_path), device=device).attention("full")
        load_ms = load_ms or 1e3 * (time.perf_counter() - start)
    chosen = [devices[i % len(devices)] for i in range(threads)]
    return train_threads(
        [loaded[device] for device in chosen],
        chosen,
        steps,
        on_step,
        settings=settings or Settings(),
        loss=loss,
        load_ms=load_ms,
    )


def train_threads(
    attends: Sequence[Attend],
    devices: Sequence[str],
    steps: int,
    on_step: Callable[[int, float], None] | None = None,
    *,
    settings: Settings,
    loss: Loss = drafting_loss,
    load_ms: float = 0.0,
) -> TrainResult:
    """Train with one thread for each pair of attention and device; the rest as in ``train``."""
    if not attends or steps < 1:
        raise InputError(
            "training needs a thread and a step", expected="1 or more", found=f"{len(attends)}, {steps}"
        )
    for attend in attends:
        if attend.spec.mask.family != "dflash":
            raise InputError(
                "this trainer is for DFlash drafters",
                expected="a package whose mask family is dflash",
                found=attend.spec.mask.family,
            )
    corpus = Corpus.of_standard_library()
    workers = [
        _Worker(rank, attend, torch.device(device), corpus, settings, loss)
        for rank, (attend, device) in enumerate(zip(attends, devices, strict=True))
    ]
    drafters = [worker.drafter for worker in workers]
    mean = GradientMean(drafters, on_step)
    before = torch.get_num_threads()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        _run(workers, mean, steps)
    finally:
        torch.set_num_threads(before)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    check_equal(drafters)
    ends = min(3, steps)
    return TrainResult(
        losses=tuple(mean.losses),
        first_loss=fmean(mean.losses[:ends]),
        last_loss=fmean(mean.losses[-ends:]),
        load_ms=load_ms,
        first_step_ms=max(worker.first_step_ms for worker in workers),
        seconds=wall,
        cpu_seconds=cpu,
        threads=len(workers),
        devices=tuple(devices),
    )


class _Worker:
    """One drafter thread's replica, optimizer and random numbers. Replicas start equal."""

    def __init__(
        self,
        rank: int,
        attend: Attend,
        device: torch.device,
        corpus: Corpus,
        settings: Settings,
        loss: Loss,
    ) -> None:
        layer_ids = target_layer_ids(settings.target_layers, settings.layers)
        config = drafter_config(
            attend.spec,
            hidden_size=settings.hidden_size,
            layers=settings.layers,
            target_layers=settings.target_layers,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            target = Target(
                hidden_size=settings.hidden_size, layers=settings.target_layers, layer_ids=layer_ids
            )
            drafter = Drafter(config)
        self.rank, self.attend, self.device = rank, attend, device
        self.target, self.drafter = target.to(device), drafter.to(device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=settings.learning_rate)
        self.generator = torch.Generator().manual_seed(settings.seed + 1 + rank)
        self.corpus, self.settings, self.loss = corpus, settings, loss
        self.first_step_ms = 0.0

    def run(self, steps: int, mean: GradientMean) -> None:
        """Every step: own lengths, own batch, own anchors; then everyone's mean gradient."""
        on_cuda = self.device.type == "cuda"
        try:
            with torch.cuda.device(self.device) if on_cuda else nullcontext():
                for step in range(steps):
                    start = time.perf_counter()
                    loss = self._backward()
                    mean.average(self.rank, loss)
                    if step == 0:
                        self.first_step_ms = 1e3 * (time.perf_counter() - start)
                    self.optimizer.step()
        except BaseException:
            mean.abort()
            raise

    def _backward(self) -> float:
        settings, generator = self.settings, self.generator
        length, slots = _draw(settings.context, generator), _draw(settings.anchors, generator)
        batch = self.corpus.batch(settings.rows, length, generator).to(self.device)
        anchors, keep = sample_anchors(batch.loss_mask, slots, generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.drafter, self.target, self.attend, batch, anchors, keep)
        loss.backward()
        return float(loss.detach())


def _run(workers: Sequence[_Worker], mean: GradientMean, steps: int) -> None:
    """Run all workers to the end; raises the first error that is not just another thread's echo."""
    each = max(1, (os.cpu_count() or 1) // len(workers))
    with ThreadPoolExecutor(
        len(workers), "drafter", initializer=torch.set_num_threads, initargs=(each,)
    ) as pool:
        futures = [pool.submit(worker.run, steps, mean) for worker in workers]
        try:
            wait(futures)
        except BaseException:
            mean.abort()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error


def _draw(bounds: tuple[int, int], generator: torch.Generator) -> int:
    """A random integer within bounds, both included."""
    return int(torch.randint(bounds[0], bounds[1] + 1, (), generator=generator))
