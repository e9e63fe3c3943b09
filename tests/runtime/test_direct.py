"""The way past the dispatcher: the operator's own results, and the operator wherever something sees it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import aotpack
from aotpack.errors import UnsupportedError
from aotpack.runtime import direct
from aotpack.runtime.operator import attention as operator
from tests.cases import Case, make_case, run

OPERATORS = ["aotpack::attention", "aotpack::attention_backward"]


@pytest.fixture
def attention(float32_pack: aotpack.Pack) -> aotpack.Attention:
    return float32_pack.attention("full")


@pytest.fixture
def case(attention: aotpack.Attention) -> Case:
    return make_case(attention.spec, 2, 150, 9)


class Subclass(torch.Tensor):
    pass


class Dispatched(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def plain(*tensors: torch.Tensor) -> bool:
    given = (*tensors, torch.zeros(1), torch.zeros(1), torch.zeros(1))[:3]
    return direct.is_plain(*given)


def test_plain_calls_have_the_operators_bits_and_do_without_it(attention, case, monkeypatch):
    found = run(attention, case)
    calls = []
    # The operator alone, for the same attention.
    monkeypatch.setattr(direct, "is_plain", lambda *tensors: calls.append(tensors))
    expected = run(attention, case)
    assert len(calls) == 1
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_would_see_the_operator_is_noticed():
    assert plain()
    assert plain(torch.nn.Parameter(torch.zeros(1)))
    assert not plain(torch.zeros(1).as_subclass(Subclass))
    three = torch.zeros(3, 1).unbind()
    assert direct.is_plain(*three, [torch.zeros(1)])
    assert not direct.is_plain(*three, [torch.zeros(1).as_subclass(Subclass)])
    for mode in (
        Dispatched(),
        Functions(),
        forward_ad.dual_level(),
        profile(activities=[ProfilerActivity.CPU]),
    ):
        with mode:
            assert not plain()
        assert plain()
    noticed = []
    torch.func.grad(lambda x: (noticed.append(plain()), x.sum())[1])(torch.zeros(3))
    torch.jit.trace(lambda x: (noticed.append(plain()), x + 1)[1], torch.zeros(1))
    assert noticed[:2] == [False, False]
    # Another thread's modes are its own.
    with Dispatched():
        thread = threading.Thread(target=lambda: noticed.append(plain()))
        thread.start()
        thread.join()
    assert noticed[-1] is True


def test_a_mode_sees_both_operators(attention, case):
    with Dispatched() as mode:
        run(attention, case)
    assert [name for name in mode.seen if name in OPERATORS] == OPERATORS


def test_a_mode_that_is_on_in_backward_alone_sees_the_operator_there(attention, case):
    mask = attention.block_mask(**case.mask)
    q = case.q.clone().requires_grad_()
    out = attention(q, case.k, case.v, mask)
    with Dispatched() as mode:
        out.backward(case.grad_out)
    assert [name for name in mode.seen if name in OPERATORS] == OPERATORS[1:]
    assert torch.equal(q.grad, run(attention, replace(case, grad_lse=0 * case.grad_lse))[2])


def test_a_profile_names_the_operators(attention, case):
    with profile(activities=[ProfilerActivity.CPU]) as found:
        run(attention, case)
    assert {"aotpack::attention", "aotpack::attention_backward"} <= {
        event.key for event in found.key_averages()
    }


def test_a_trace_of_torch_jit_calls_the_operator(attention, case):
    mask = attention.block_mask(**case.mask)
    traced = torch.jit.trace(
        lambda q, k, v: attention(q, k, v, mask), (case.q, case.k, case.v), check_trace=False
    )
    assert "aotpack::attention" in str(traced.graph)
    other = make_case(attention.spec, 2, 150, 9, seed=1)
    assert torch.equal(traced(other.q, other.k, other.v), attention(other.q, other.k, other.v, mask))


def test_a_second_derivative_is_refused_where_the_operator_was_not_called(attention, case):
    mask = attention.block_mask(**case.mask)
    q = case.q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(attention(q, case.k, case.v, mask).sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated twice"):
        grad.sum().backward()


def test_a_graph_keeps_its_mask_until_backward(attention, case):
    mask = list(attention.block_mask(**case.mask).tensors)
    q = case.q.clone().requires_grad_()
    out, _ = direct.attend(attention._key, attention._programs, q, case.k, case.v, mask)
    mask_of_graph = [tensor.clone() for tensor in mask]
    del mask
    out.backward(case.grad_out)
    other = case.q.clone().requires_grad_()
    operator(attention._key, other, case.k, case.v, mask_of_graph)[0].backward(case.grad_out)
    assert torch.equal(q.grad, other.grad)
