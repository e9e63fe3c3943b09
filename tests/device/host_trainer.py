"""The trainer of ``host_round.py``: one target feeds drafter threads of its own process.

    python tests/device/host_trainer.py '{"started": 1760000000000000000, "who": "aotpack", ...}'

The fields are those of ``Job``. What happens is said as JSON lines on stdout, each with the seconds since the
process was started. The main thread runs the target; every drafter thread loads its own attention, and meets
the others at each step for the mean gradient.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import json
import math
import os
import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aotpack import no_tracing
from aotpack.bench.case import Case
from aotpack.bench.jobs.clock import synchronize
from aotpack.bench.jobs.ways import way
from aotpack.bench.jobs.workload import read_spec
from aotpack.demo.averaging import GradientMean, check_equal
from aotpack.demo.data import Batch, Corpus, sample_anchors
from aotpack.demo.drafter import Attend, Drafter, Target, drafter_config, drafting_loss, target_layer_ids

COMPILERS = ("cc", "gcc", "c++", "g++", "clang", "clang++", "nvcc", "ptxas", "nvlink", "ld")
WAITING = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start of the trainer.

    Attributes:
        started: when the process was, in nanoseconds of ``time.time_ns``.
        who: a name of ``aotpack.bench.rivals.NAMES`` that ``ways.way`` knows: aotpack or flex.
        package, spec: whose attention is trained with.
        target: device of the target.
        drafters: device of each drafter thread.
        rows: batch size B of a thread.
        context, anchors: the greatest S and N; a step's own are drawn from the upper half below them.
        hidden, layers: of the drafter; the target has four times as many layers.
        steps: optimizer steps.
    """

    started: int
    who: str
    package: str
    spec: str
    target: str
    drafters: tuple[str, ...]
    rows: int
    context: int
    anchors: int
    hidden: int
    layers: int
    steps: int


class StoppedError(Exception):
    """Another thread failed."""


@dataclass(frozen=True)
class Example:
    """One step's batch on a drafter's device, and the target's states of it, [B, S, layers*hidden]."""

    batch: Batch
    anchors: Tensor
    keep: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Heard:
    """Stands where ``drafting_loss`` takes a target: its embedding, and hidden states made elsewhere."""

    embedding: nn.Embedding
    hidden: Tensor

    def __call__(self, tokens: Tensor) -> Tensor:
        return self.hidden


class Channel:
    """Examples on their way from the target to one thread; few of them wait for it."""

    def __init__(self, stop: threading.Event) -> None:
        self._queue: queue.Queue[Example] = queue.Queue(WAITING)
        self._stop = stop

    def put(self, example: Example) -> None:
        self._retry(lambda: self._queue.put(example, timeout=0.2))

    def get(self) -> Example:
        return self._retry(lambda: self._queue.get(timeout=0.2))

    def _retry(self, call: Callable[[], Any]) -> Any:
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full, queue.Empty):
                return call()
        raise StoppedError


class Trainer:
    """A target, a replica of the drafter for each thread, and what they share."""

    def __init__(self, job: Job) -> None:
        self.job, spec = job, read_spec(case_of(job, job.target))
        dtype, target_layers = getattr(torch, spec.dtype), 4 * job.layers
        config = drafter_config(spec, hidden_size=job.hidden, layers=job.layers, target_layers=target_layers)
        torch.manual_seed(0)
        with torch.device(job.target):
            layer_ids = target_layer_ids(target_layers, job.layers)
            target = Target(hidden_size=job.hidden, layers=target_layers, layer_ids=layer_ids)
            first = Drafter(config).to(dtype)
        self.target = target.to(dtype)
        self.drafters = [copy.deepcopy(first).to(device) for device in job.drafters]
        self.stop, self.mean = threading.Event(), GradientMean(self.drafters)
        self.channels = [Channel(self.stop) for _ in job.drafters]
        self.lengths: set[tuple[int, int]] = set()
        self.failed = False

    def feed(self) -> None:
        """What the target does: every thread's batches, anchors and hidden states."""
        job, generator, corpus = self.job, torch.Generator().manual_seed(1), Corpus.of_standard_library()
        for _ in range(job.steps):
            for channel, device in zip(self.channels, job.drafters, strict=True):
                length, slots = (
                    int(torch.randint(-(-most // 2), most + 1, (), generator=generator))
                    for most in (job.context, job.anchors)
                )
                batch = corpus.batch(job.rows, length, generator)
                anchors, keep = sample_anchors(batch.loss_mask, slots, generator)
                self.lengths.add((length, anchors.shape[1]))
                hidden = self.target(batch.tokens.to(job.target))
                channel.put(Example(batch.to(device), anchors.to(device), keep.to(device), hidden.to(device)))

    def draft(self, rank: int) -> None:
        """What drafter thread ``rank`` does: load, then step after step."""
        device, drafter = self.job.drafters[rank], self.drafters[rank]
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // len(self.drafters)))
        on_cuda = torch.device(device).type == "cuda"
        with torch.cuda.device(device) if on_cuda else contextlib.nullcontext():
            attend = way(self.job.who, case_of(self.job, device))
            say(self.job, "loaded", thread=rank)
            embedding = copy.deepcopy(self.target.embedding).to(device)
            optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3)
            for step in range(self.job.steps):
                optimizer.zero_grad(set_to_none=True)
                loss = backward(drafter, embedding, attend, self.channels[rank].get())
                if step == 0:
                    synchronize(device)
                    say(self.job, "gradients", thread=rank)
                self.mean.average(rank, loss)
                optimizer.step()
                if step == 0:
                    synchronize(device)
                say(self.job, "step", thread=rank, step=step)

    def run(self) -> None:
        """Starts the threads, feeds them and waits for them; what was raised has been said."""
        threads = [
            threading.Thread(target=self._guarded, args=(self.draft, rank), name=f"drafter {rank}")
            for rank in range(len(self.drafters))
        ]
        for thread in threads:
            thread.start()
        self._guarded(self.feed)
        for thread in threads:
            thread.join()

    def _guarded(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except (StoppedError, threading.BrokenBarrierError):
            self.failed = True
        except Exception as error:  # noqa: BLE001 - how a rival fails is a result
            self.failed = True
            text = (str(error).strip() or "no message").splitlines()[0]
            name = threading.current_thread().name
            who = "target" if name == "MainThread" else name
            say(self.job, "raised", who=who, error=f"{type(error).__name__}: {text[:200]}")
        if self.failed:
            self.stop.set()
            self.mean.abort()


def say(job: Job, event: str, **more: Any) -> None:
    """One line; in one write, because threads share stdout and a hang must not hold it back."""
    seconds = round((time.time_ns() - job.started) / 1e9, 4)
    os.write(1, (json.dumps({"event": event, "seconds": seconds, **more}) + "\n").encode())


def case_of(job: Job, device: str) -> Case:
    """What a way to attend is made for."""
    return Case(
        package=job.package,
        spec=job.spec,
        device=device,
        batch=job.rows,
        context=job.context,
        anchors=job.anchors,
    )


def backward(drafter: Drafter, embedding: nn.Embedding, attend: Attend, example: Example) -> float:
    """The loss of one step; its gradients are left in the drafter."""
    heard: Any = Heard(embedding, example.hidden)
    loss = drafting_loss(drafter, heard, attend, example.batch, example.anchors, example.keep)
    loss.backward()
    value = float(loss.detach())
    if not math.isfinite(value):
        raise ArithmeticError(f"the loss is {value}")
    return value


@contextlib.contextmanager
def proven(own: bool) -> Iterator[Callable[[], int | None]]:
    """With nothing to compile with, and nothing traced, where it is aotpack that attends."""
    if not own:
        yield lambda: None
        return
    found = [name for name in COMPILERS if shutil.which(name)]
    if found:
        raise RuntimeError(f"there are compilers on PATH: {', '.join(found)}")
    with no_tracing() as watch:
        yield lambda: watch.count


def device_name(device: str) -> str:
    """What the device is called."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"


def main(text: str) -> int:
    """Train once."""
    faulthandler.enable()
    fields = json.loads(text)
    job = Job(**{**fields, "drafters": tuple(fields["drafters"])})
    say(job, "imported")
    # The target's attention; cuDNN's would be compiled by the driver, into its cache.
    torch.backends.cuda.enable_cudnn_sdp(False)
    with proven(job.who == "aotpack") as traces:
        trainer = Trainer(job)
        devices = (job.target, *job.drafters)
        for device in dict.fromkeys(devices):
            synchronize(device)
        say(job, "made", torch=torch.__version__, devices=[device_name(device) for device in devices])
        trainer.run()
        say(job, "ended", traces=traces())
        if trainer.failed:
            return 1
        check_equal(trainer.drafters)
        losses = trainer.mean.losses
        say(job, "checked", losses=[losses[0], losses[-1]], lengths=len(trainer.lengths))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
