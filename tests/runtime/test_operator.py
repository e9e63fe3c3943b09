"""attend as a torch operator: autograd, torch.compile and checkpointing around it, autocast."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import aotpack
from aotpack.errors import InputError, UnsupportedError
from aotpack.runtime.operator import enroll
from tests.cases import Case, exact, make_case, relative_error, run, visible_cells


@pytest.fixture
def attention(float32_pack: aotpack.Pack) -> aotpack.Attention:
    return float32_pack.attention("full")


@pytest.fixture
def case(attention: aotpack.Attention) -> Case:
    return make_case(attention.spec, 2, 150, 9)


def test_operators_pass_torchs_own_checks(attention: aotpack.Attention, case: Case) -> None:
    mask = list(attention.block_mask(**case.mask).tensors)
    inputs = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    torch.library.opcheck(torch.ops.aotpack.attention.default, (attention._key, *inputs, mask))


def test_non_contiguous_expanded_and_offset_inputs(attention: aotpack.Attention, case: Case) -> None:
    expected = run(attention, case)
    mask = attention.block_mask(**case.mask)
    q = case.q.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    k = torch.cat([torch.zeros(1), case.k.flatten()])[1:].view(case.k.shape).requires_grad_()
    v = case.v.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0).requires_grad_()
    out, lse = attention(q, k, v, mask, return_lse=True)
    grad_out = case.grad_out.transpose(1, 2).contiguous().transpose(1, 2)
    torch.autograd.backward([out, lse], [grad_out, case.grad_lse])
    for found, right in zip((out, lse, q.grad, k.grad, v.grad), expected, strict=True):
        assert found is not None
        assert torch.equal(found, right)


def test_programs_get_tensors_that_begin_at_multiples_of_16_bytes(
    attention: aotpack.Attention, case: Case
) -> None:
    programs = attention._programs
    assert programs is not None
    places: list[int] = []

    class Watched:
        def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor]) -> tuple[Tensor, Tensor]:
            places.extend(tensor.data_ptr() for tensor in (q, k, v))
            return programs.forward(q, k, v, mask)

    watched = Watched()
    mask = list(attention.block_mask(**case.mask).tensors)
    offset = [torch.cat([torch.zeros(1), t.flatten()])[1:].view(t.shape) for t in (case.q, case.k, case.v)]
    assert all(tensor.data_ptr() % 16 for tensor in offset)
    with torch.no_grad():
        out, _ = torch.ops.aotpack.attention.default(enroll(watched), *offset, mask)
        assert torch.equal(out, attention(case.q, case.k, case.v, attention.block_mask(**case.mask)))
    assert [place % 16 for place in places] == [0, 0, 0]


def test_broadcast_gradient_and_one_tensor_as_key_and_value(attention: aotpack.Attention, case: Case) -> None:
    mask = attention.block_mask(**case.mask)
    shared = case.k.clone().requires_grad_()
    out = attention(case.q, shared, shared, mask)
    out.sum().backward()
    ones = Case(
        q=case.q, k=case.k, v=case.k, mask=case.mask,
        grad_out=torch.ones_like(out), grad_lse=torch.zeros(out.shape[:3]),
    )  # fmt: skip
    _, _, _, dk, dv = exact(attention.spec, ones, visible_cells(attention.spec, ones))
    assert shared.grad is not None
    assert relative_error(shared.grad, dk + dv) < 1e-5


@pytest.mark.parametrize("wanted", ["q", "k", "v"])
def test_only_the_inputs_that_need_a_gradient_get_one(
    attention: aotpack.Attention, case: Case, wanted: str
) -> None:
    tensors = {"q": case.q.clone(), "k": case.k.clone(), "v": case.v.clone()}
    tensors[wanted].requires_grad_()
    out = attention(**tensors, mask=attention.block_mask(**case.mask))
    out.backward(case.grad_out)
    full = dict(
        zip("qkv", run(attention, Case(**{**_fields(case), "grad_lse": case.grad_lse * 0}))[2:], strict=True)
    )
    assert tensors[wanted].grad is not None
    assert torch.equal(tensors[wanted].grad, full[wanted])
    assert all(t.grad is None for name, t in tensors.items() if name != wanted)


def _fields(case: Case) -> dict[str, object]:
    return {name: getattr(case, name) for name in ("q", "k", "v", "grad_out", "grad_lse", "mask")}


def test_no_gradient_at_all(attention: aotpack.Attention, case: Case) -> None:
    mask = attention.block_mask(**case.mask)
    out = attention(case.q, case.k, case.v, mask)
    assert not out.requires_grad
    with torch.no_grad():
        assert torch.equal(attention(case.q.clone().requires_grad_(), case.k, case.v, mask), out)
    with torch.inference_mode():
        assert torch.equal(attention(case.q, case.k, case.v, mask), out)


def test_retain_graph_gives_the_same_gradient_twice(attention: aotpack.Attention, case: Case) -> None:
    q = case.q.clone().requires_grad_()
    out = attention(q, case.k, case.v, attention.block_mask(**case.mask))
    first = torch.autograd.grad(out, q, case.grad_out, retain_graph=True)
    second = torch.autograd.grad(out, q, case.grad_out)
    assert torch.equal(first[0], second[0])


def test_a_loss_of_the_log_sum_exp_alone(attention: aotpack.Attention, case: Case) -> None:
    q = case.q.clone().requires_grad_()
    _, lse = attention(q, case.k, case.v, attention.block_mask(**case.mask), return_lse=True)
    rows = lse > -torch.inf
    lse[rows].sum().backward()
    alone = Case(**{**_fields(case), "grad_out": case.grad_out * 0, "grad_lse": torch.ones_like(lse)})
    _, _, dq, _, _ = exact(attention.spec, alone, visible_cells(attention.spec, alone))
    assert q.grad is not None
    assert relative_error(q.grad, dq) < 1e-5


def test_a_second_derivative_is_refused_by_name(attention: aotpack.Attention, case: Case) -> None:
    q = case.q.clone().requires_grad_()
    out = attention(q, case.k, case.v, attention.block_mask(**case.mask))
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_torch_compile_around_it_sees_one_opaque_call(attention: aotpack.Attention, case: Case) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph

    def layer(q: torch.Tensor) -> torch.Tensor:
        return attention(q * 2, case.k, case.v, mask).sin()

    mask = attention.block_mask(**case.mask)
    q = case.q.clone().requires_grad_()
    out = torch.compile(layer, backend=backend, fullgraph=True)(q)
    assert torch.equal(out, layer(q))
    calls = [n for n in graphs[0].graph.nodes if n.target is torch.ops.aotpack.attention.default]
    assert len(graphs) == 1
    assert len(calls) == 1


def test_compiled_outer_model_has_the_same_gradients(attention: aotpack.Attention, case: Case) -> None:
    mask = attention.block_mask(**case.mask)

    def loss(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        out, lse = attention(q * 2, k, case.v, mask, return_lse=True)
        return out.sin().sum() + lse.clamp(min=-50).sum()

    inputs = [t.clone().requires_grad_() for t in (case.q, case.k)]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True)(*inputs), inputs)
    for found, right in zip(compiled, eager, strict=True):
        assert relative_error(found, right) < 1e-5


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(attention: aotpack.Attention, case: Case, reentrant: bool) -> None:
    mask = attention.block_mask(**case.mask)
    inputs = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    out = checkpoint(lambda q, k, v: attention(q, k, v, mask), *inputs, use_reentrant=reentrant)
    out.backward(case.grad_out)
    silent = Case(**{**_fields(case), "grad_lse": case.grad_lse * 0})
    for tensor, right in zip(inputs, run(attention, silent)[2:], strict=True):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, right)


def test_autocast_casts_and_gradients_keep_each_inputs_dtype(dflash_pack: aotpack.Pack) -> None:
    attention = dflash_pack.attention("full")
    case = make_case(attention.spec, 1, 100, 5)
    q, k = case.q.float().requires_grad_(), case.k.float().requires_grad_()
    v = case.v.clone().requires_grad_()
    mask = attention.block_mask(**case.mask)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, mask)
    out.backward(case.grad_out)
    assert out.dtype == torch.bfloat16
    assert [t.grad.dtype for t in (q, k, v) if t.grad is not None] == [
        torch.float32,
        torch.float32,
        torch.bfloat16,
    ]
    with pytest.raises(InputError, match="wrong dtype"):
        attention(q, k, v, mask)
