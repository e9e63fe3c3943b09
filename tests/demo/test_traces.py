from __future__ import annotations

import pytest
import torch
from torch.fx import Tracer
from torch.fx.experimental.proxy_tensor import make_fx

from aotpack.demo.traces import TraceCounter


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_eager_work_is_no_trace():
    with TraceCounter() as traces:
        torch.ones(3, requires_grad=True).sum().backward()
    assert traces.count == 0


def test_fx_traces_are_counted():
    with TraceCounter() as traces:
        torch.fx.symbolic_trace(double)
        assert traces.count == 1
        make_fx(double)(torch.ones(2))
        assert traces.count == 2


@pytest.mark.parametrize("fullgraph", [True, False])
def test_dynamo_frames_are_counted_and_recompilations_too(fullgraph):
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    torch.compiler.reset()
    compiled = torch.compile(triple, backend="eager", fullgraph=fullgraph, dynamic=False)
    with TraceCounter() as traces:
        compiled(torch.ones(2))
        once = traces.count
        assert once >= 1
        compiled(torch.ones(2))
        assert traces.count == once
        compiled(torch.ones(3))
        assert traces.count > once


def test_what_was_traced_before_does_not_count():
    torch.compile(double, backend="eager")(torch.ones(2))
    with TraceCounter() as traces:
        pass
    assert traces.count == 0


def test_torch_is_left_as_it_was():
    before = Tracer.trace
    with TraceCounter():
        assert Tracer.trace is not before
    assert Tracer.trace is before
