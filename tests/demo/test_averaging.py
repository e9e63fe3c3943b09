from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from aotpack.demo.averaging import GradientMean, check_equal
from aotpack.errors import AotpackError


def replicas(count: int) -> list[nn.Linear]:
    made = []
    for _ in range(count):
        torch.manual_seed(0)
        made.append(nn.Linear(5, 4))
    return made


def set_gradients(modules: list[nn.Linear]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for module in modules:
        for parameter in module.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    return [module.weight.grad.clone() for module in modules]


def meet(mean: GradientMean, losses: list[float]) -> None:
    threads = [threading.Thread(target=mean.average, args=(i, loss)) for i, loss in enumerate(losses)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_every_replica_gets_the_mean():
    modules = replicas(3)
    weights = set_gradients(modules)
    seen = []
    mean = GradientMean(modules, lambda step, loss: seen.append((step, loss)))
    meet(mean, [1.0, 2.0, 6.0])
    torch.testing.assert_close(modules[0].weight.grad, torch.stack(weights).mean(0))
    for module in modules[1:]:
        assert torch.equal(module.weight.grad, modules[0].weight.grad)
        assert torch.equal(module.bias.grad, modules[0].bias.grad)
        assert module.weight.grad.data_ptr() != modules[0].weight.grad.data_ptr()
    assert seen == [(0, 3.0)]
    assert mean.losses == [3.0]


def test_a_thread_that_fails_frees_the_others():
    mean = GradientMean(replicas(2))
    raised = []

    def wait() -> None:
        try:
            mean.average(0, 0.0)
        except threading.BrokenBarrierError as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    mean.abort()
    thread.join(30)
    assert len(raised) == 1


def test_replicas_that_differ_by_a_bit_are_named():
    modules = replicas(3)
    check_equal(modules)
    with torch.no_grad():
        modules[2].bias[1] = torch.nextafter(modules[2].bias[1], torch.tensor(torch.inf))
    with pytest.raises(AotpackError, match="drifted apart") as caught:
        check_equal(modules)
    assert caught.value.found == "replica 2 differs in bias"
