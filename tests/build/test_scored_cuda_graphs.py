"""The graphs that scored CUDA programs are compiled from, run on the CPU against dense fp64 math."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from aotpack.build.blocks import MASK_TENSORS
from aotpack.build.specialisations import ATTENTION
from aotpack.build.variants_cuda import attention_graphs
from aotpack.masks import family_of
from aotpack.scores import family_of as family_of_score
from tests.score_cases import ScoreCase, exact, score_case
from tests.score_specs import SPECS


@pytest.fixture(scope="module", autouse=True)
def _no_fake_tensor_cache() -> Iterator[None]:
    """As in the build's own process, where TORCH_FAKE_TENSOR_DISPATCH_CACHE is 0."""
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield


def lists(case: ScoreCase) -> dict[str, Tensor]:
    visible, batch = case.visible, case.mask_batch
    made = create_block_mask(
        lambda b, h, q, kv: visible[b, 0, q, kv], batch, None, *visible.shape[2:], device="cpu"
    )
    return {f"mask.{name}": getattr(made, name) for name in MASK_TENSORS}


@pytest.mark.parametrize("name", SPECS)
def test_forward_and_backward_agree_with_dense_math(name: str) -> None:
    spec = SPECS[name]
    forward, backward = attention_graphs(spec, ATTENTION[-1], {})
    trained = [given.name for given in family_of_score(spec.score).trained]
    assert forward.outputs == ("out", "lse")
    assert backward.outputs == ("grad.q", "grad.k", "grad.v", *(f"grad.score.{each}" for each in trained))
    case = score_case(spec, 2, 150, 17)
    inputs = {g.name: case.mask[g.name] for g in family_of(spec.mask).inputs}
    known = {
        "q": case.q, "k": case.k, "v": case.v, "grad.out": case.grad_out, "grad.lse": case.grad_lse,
        **lists(case),
        # Positions come out of the block-mask program in 32 bits.
        **{f"mask.{name}": tensor.int() for name, tensor in inputs.items() if tensor.dtype == torch.int64},
        **{f"input.{name}": tensor for name, tensor in inputs.items()},
        **{f"score.{name}": tensor for name, tensor in case.score.items()},
    }  # fmt: skip
    out, lse = forward.module.forward(*(known[each] for each in forward.inputs))
    known |= {"out": out, "lse": lse}
    grads = backward.module.forward(*(known[each] for each in backward.inputs))
    for found, right in zip((out, lse, *grads[:3]), exact(case)[:5], strict=True):
        case.check(found, right)
    for each, found, right in zip(trained, grads[3:], exact(case)[5:], strict=True):
        # Run as it is, a graph sums in the tensor's own dtype; the kernels compiled from it do in float32.
        coarse = case.score[each].dtype == torch.bfloat16
        case.check(found, right, tolerance=0.25 if coarse else None)
