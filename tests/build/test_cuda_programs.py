"""The graphs that CUDA programs are compiled from, run on the CPU: torch's own dense flex attention."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from aotpack.build.blocks import BLOCK, MASK_TENSORS
from aotpack.build.export import Graph, differentiate, export
from aotpack.build.programs_cuda import attention_program, block_mask_program
from aotpack.build.specialisations import ATTENTION, BLOCK_MASK, exact
from aotpack.dense import dense_attention
from aotpack.masks import Lengths, dense, family_of
from aotpack.spec import AttentionSpec
from tests.cases import Case, make_case
from tests.conftest import MASKS, MORE_MASKS, SMALL

DIV128, INT32, GENERAL = ATTENTION
ALL = {**MASKS, **MORE_MASKS}
# Those whose rules are parts of the others take their minutes only when asked for.
EVERY_MASK = [*MASKS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_MASKS)]
SIZES = [(1, 64, 1), (2, 777, 13), (3, 130, 24)]


def small(mask: str) -> AttentionSpec:
    return AttentionSpec(dtype="float32", mask=ALL[mask], **SMALL)


def lengths_of(spec: AttentionSpec, case: Case) -> Lengths:
    batch = case.q.shape[0] if family_of(spec.mask).batched else 1
    return Lengths(batch=batch, query=case.q.shape[2], key=case.key_length)


def rule_inputs(spec: AttentionSpec, case: Case) -> dict[str, Tensor]:
    return {given.name: case.mask[given.name] for given in family_of(spec.mask).inputs}


@pytest.fixture(scope="module", autouse=True)
def _no_fake_tensor_cache() -> Iterator[None]:
    """As in the build's own process, where TORCH_FAKE_TENSOR_DISPATCH_CACHE is 0."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


@functools.cache
def block_mask_graph(name: str) -> Graph:
    return export(block_mask_program(small(name), BLOCK_MASK))


def run_block_mask(graph: Graph, spec: AttentionSpec, case: Case) -> dict[str, Tensor]:
    sizes = lengths_of(spec, case)
    lengths = {
        "length.context": sizes.key - sizes.query,
        "length.query": sizes.query,
        "length.key": sizes.key,
    }
    inputs = rule_inputs(spec, case)
    carriers = {
        name: torch.empty(1, dtype=torch.int8).expand(lengths[name])
        for name in graph.inputs
        if name in lengths
    }
    # Not a call of the module, which insists on more than one block: the traced sizes' lower bound.
    found = graph.module.forward(*({**inputs, **carriers}[name] for name in graph.inputs))
    return dict(zip(graph.outputs, found, strict=True))


@pytest.mark.parametrize("mask", EVERY_MASK)
@pytest.mark.parametrize("sizes", SIZES)
def test_block_lists_are_those_of_create_block_mask(mask: str, sizes: tuple[int, int, int]) -> None:
    spec = small(mask)
    case = make_case(spec, *sizes)
    lengths = lengths_of(spec, case)
    rule = family_of(spec.mask).rule(spec.mask, rule_inputs(spec, case), lengths)
    batch = lengths.batch if lengths.batch > 1 else None
    expected = create_block_mask(
        lambda b, h, q, kv: rule(b, q, kv), batch, None, lengths.query, lengths.key, device="cpu"
    )
    found = run_block_mask(block_mask_graph(mask), spec, case)
    for name in MASK_TENSORS:
        tensor, wanted = found[name], getattr(expected, name)
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
        if name.endswith("indices"):
            counts = found[name.replace("indices", "num_blocks")]
            listed = torch.arange(tensor.shape[-1]) < counts.unsqueeze(-1)
            assert torch.equal(tensor.where(listed, 0), wanted.where(listed, 0))
        else:
            assert torch.equal(tensor, wanted)


def run_attention(
    graphs: tuple[Graph, Graph], spec: AttentionSpec, case: Case, mask: dict[str, Tensor]
) -> Any:
    forward, backward = graphs
    known = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "grad.out": case.grad_out,
        "grad.lse": case.grad_lse,
        **{f"mask.{name}": tensor for name, tensor in mask.items()},
        **{f"input.{name}": tensor for name, tensor in rule_inputs(spec, case).items()},
    }
    out, lse = forward.module.forward(*(known[name] for name in forward.inputs))
    known |= {"out": out, "lse": lse}
    return (out, lse, *backward.module.forward(*(known[name] for name in backward.inputs)))


def reference(spec: AttentionSpec, case: Case) -> list[Tensor]:
    q, k, v = (tensor.double().requires_grad_() for tensor in (case.q, case.k, case.v))
    visible = dense(spec.mask, rule_inputs(spec, case), lengths_of(spec, case))
    out, lse = dense_attention(q, k, v, visible, spec.scale)
    grads = torch.autograd.grad([out, lse], [q, k, v], [case.grad_out.double(), case.grad_lse.double()])
    return [out, lse, *grads]


@pytest.mark.parametrize("mask", EVERY_MASK)
def test_forward_and_backward_agree_with_dense_math(mask: str) -> None:
    spec = small(mask)
    graphs = differentiate(attention_program(spec, GENERAL, {}))
    assert graphs[0].outputs == ("out", "lse")
    assert graphs[1].outputs == ("grad.q", "grad.k", "grad.v")
    for sizes in SIZES:
        case = make_case(spec, *sizes)
        lists = run_block_mask(block_mask_graph(mask), spec, case)
        found = run_attention(graphs, spec, case, lists)
        for tensor, expected in zip(found, reference(spec, case), strict=True):
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-4, atol=1e-4)


def test_forward_takes_positions_from_the_block_mask_and_the_rest_from_the_caller() -> None:
    program = attention_program(small("full"), INT32, {})
    assert program.inputs[3 + len(MASK_TENSORS) :] == ("mask.anchors", "input.keep")
    assert block_mask_program(small("full"), BLOCK_MASK).outputs == (*MASK_TENSORS, "anchors")


def test_a_mask_that_all_entries_share_has_batch_one() -> None:
    for mask in ("speculators", "causal", "everything"):
        program = attention_program(small(mask), GENERAL, {})
        lists = [arg for name, arg in zip(program.inputs, program.args, strict=True) if "blocks" in name]
        assert {arg.shape[0] for arg in lists} == {1}
        assert program.args[0].shape[0] > 1


def test_specialisations_run_from_the_tightest_to_the_one_for_any_size() -> None:
    assert [kind.name for kind in ATTENTION] == ["div128", "int32", "general"]
    assert (DIV128.divisor, INT32.divisor, GENERAL.divisor) == (BLOCK, 1, 1)
    assert (DIV128.narrow, INT32.narrow, GENERAL.narrow) == (True, True, False)


def test_an_exact_shape_has_no_dynamic_dimension() -> None:
    kind = exact(1, 8192, 12288)
    assert kind.name == "b1.q8192.k12288"
    program = attention_program(small("full"), kind, {})
    assert not any(program.dynamic_shapes)
    shapes = dict(zip(program.inputs, (tuple(arg.shape) for arg in program.args), strict=True))
    assert shapes["q"] == (1, 6, 8192, 32)
    assert shapes["mask.kv_indices"] == (1, 1, 64, 96)
    assert shapes["input.keep"] == (1, 512)


@pytest.mark.parametrize(("precision", "triton"), [("highest", "'ieee'"), ("high", "'tf32'")])
def test_float32_products_have_the_precision_of_the_spec(precision: str, triton: str) -> None:
    spec = AttentionSpec(dtype="float32", mask=MASKS["causal"], matmul_precision=precision, **SMALL)
    torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
    try:
        graphs = differentiate(attention_program(spec, GENERAL, {}))
    finally:
        torch.set_float32_matmul_precision("highest")
    for graph in graphs:
        given = [a for node in graph.module.graph.nodes for a in node.args if isinstance(a, dict)]
        assert {options["FLOAT32_PRECISION"] for options in given} == {triton}
