"""Where the threads of a process meet at every step: one mean gradient for all replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from statistics import fmean

import torch
from torch import nn

from aotpack.errors import AotpackError

__all__ = ["GradientMean", "check_equal"]


class GradientMean:
    """The last thread to come puts the mean gradient into every replica.

    Gradients are added in one fixed order, on the first replica's device, so that all replicas get the
    same bits whoever comes last.

    Args:
        replicas: modules of one architecture, one for each thread.
        on_step: called with each step's number and mean loss while all threads wait.

    Attributes:
        losses: the mean over the threads, of each step.
    """

    def __init__(
        self, replicas: Sequence[nn.Module], on_step: Callable[[int, float], None] | None = None
    ) -> None:
        self._parameters = [list(replica.parameters()) for replica in replicas]
        self._devices = {p.device for p, *_ in self._parameters if p.device.type == "cuda"}
        self._latest = [0.0] * len(replicas)
        self._barrier = threading.Barrier(len(replicas), action=self._average)
        self._on_step = on_step
        self.losses: list[float] = []

    def average(self, rank: int, loss: float) -> None:
        """Wait for all threads; on return ``.grad`` of this replica's parameters is the mean.

        Raises:
            threading.BrokenBarrierError: another thread failed.
        """
        self._latest[rank] = loss
        self._barrier.wait()

    def abort(self) -> None:
        """Let the threads that wait, or will, fail too."""
        self._barrier.abort()

    @torch.no_grad()
    def _average(self) -> None:
        self._synchronize()
        for same in zip(*self._parameters, strict=True):
            grads = [p.grad for p in same if p.grad is not None]
            if len(grads) != len(same):
                raise AotpackError("a parameter of the drafter got no gradient")
            total = grads[0]
            for grad in grads[1:]:
                total.add_(grad.to(total.device))
            total.div_(len(grads))
            for grad in grads[1:]:
                grad.copy_(total)
        self._synchronize()
        self.losses.append(fmean(self._latest))
        if self._on_step is not None:
            self._on_step(len(self.losses) - 1, self.losses[-1])

    def _synchronize(self) -> None:
        for device in self._devices:
            torch.cuda.synchronize(device)


def check_equal(replicas: Sequence[nn.Module]) -> None:
    """Raises ``AotpackError`` unless all replicas hold the same bits."""
    first = dict(replicas[0].named_parameters())
    for rank, replica in enumerate(replicas[1:], start=1):
        for name, parameter in replica.named_parameters():
            if not torch.equal(parameter.cpu(), first[name].cpu()):
                raise AotpackError(
                    "the drafter replicas drifted apart",
                    expected="equal bits",
                    found=f"replica {rank} differs in {name}",
                )
