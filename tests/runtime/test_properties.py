"""Properties of attention over drawn masks, lengths, layouts and losses, against dense fp64 math."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor

import aotpack
from tests.cases import Case, exact, make_case, relative_error, visible_cells
from tests.conftest import MASKS, SEED

LAYOUTS = ("contiguous", "transposed", "strided", "offset")
drawn_steps = st.fixed_dictionaries(
    {
        "name": st.sampled_from(list(MASKS)),
        "batch": st.integers(1, 3),
        "context": st.one_of(st.integers(1, 300), st.sampled_from([127, 128, 129, 255, 256, 257])),
        "anchors": st.integers(1, 20),
        "seed": st.integers(0, 1 << 30),
        "keep": st.sampled_from([0.0, 0.5, 1.0]),
        "layouts": st.tuples(*[st.sampled_from(LAYOUTS)] * 3),
        "loss": st.sampled_from(["out", "lse", "both"]),
        "shared_mask": st.booleans(),
    }
)


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A leaf with the same values, in another place of another storage."""
    b, h, n, d = tensor.shape
    match layout:
        case "transposed":  # as a projection's [B,N,H,D] gives it
            made = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        case "strided":
            made = torch.full((b, h, n, 2 * d), torch.nan)[..., ::2].copy_(tensor)
        case "offset":
            made = torch.full((tensor.numel() + 3,), torch.nan)[3:].view(b, h, n, d).copy_(tensor)
        case _:
            made = tensor.clone()
    return made.detach().requires_grad_()


def weighted(case: Case, loss: str) -> Case:
    """The case with the gradient of one output set to zero."""
    zero = {"out": "grad_lse", "lse": "grad_out"}.get(loss)
    if zero is None:
        return case
    values = {name: getattr(case, name) for name in case.__dataclass_fields__}
    return Case(**{**values, zero: torch.zeros_like(values[zero])})


@seed(SEED)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(step=drawn_steps)
def test_every_step_equals_dense_math(masks_pack: aotpack.Pack, step: dict) -> None:
    attention = masks_pack.attention(step["name"])
    made = make_case(
        attention.spec, step["batch"], step["context"], step["anchors"], seed=step["seed"], keep=step["keep"]
    )
    case = weighted(made, step["loss"])
    q, k, v = (
        laid_out(t, layout) for t, layout in zip((case.q, case.k, case.v), step["layouts"], strict=True)
    )
    mask = attention.block_mask(**case.mask)
    out, lse = attention(q, k, v, mask, return_lse=True)
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    expected = exact(attention.spec, case, visible_cells(attention.spec, case))
    found = (out.detach(), lse.detach(), q.grad, k.grad, v.grad)
    for name, given_tensor, right in zip(("out", "lse", "dq", "dk", "dv"), found, expected, strict=True):
        assert given_tensor is not None
        assert not given_tensor.isnan().any(), name
        # Gradients that should vanish are compared with the size of those that need not.
        if right.abs().max() < 1e-6:
            assert given_tensor.nan_to_num(neginf=0.0).abs().max() < 1e-4, name
        else:
            assert relative_error(given_tensor, right) < 2e-5, name
