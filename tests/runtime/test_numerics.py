"""Forward, log-sum-exp and gradients against dense fp64 math."""

from __future__ import annotations

import pytest
import torch

import aotpack
from tests.cases import NAMES, exact, make_case, relative_error, run, visible_cells
from tests.conftest import MASKS

SHAPES = [(1, 64, 1), (2, 129, 7), (2, 777, 131), (1, 1500, 33)]


@pytest.mark.parametrize(("batch", "context", "anchors"), SHAPES)
def test_float32_is_within_1e_5_of_fp64(
    float32_pack: aotpack.Pack, batch: int, context: int, anchors: int
) -> None:
    attention = float32_pack.attention("full")
    case = make_case(attention.spec, batch, context, anchors)
    expected = exact(attention.spec, case, visible_cells(attention.spec, case))
    for name, found, right in zip(NAMES, run(attention, case), expected, strict=True):
        assert not found.isnan().any(), name
        assert relative_error(found, right) < 1e-5, name


@pytest.mark.parametrize(("batch", "context", "anchors"), SHAPES)
def test_bfloat16_is_no_worse_than_dense_bfloat16(
    dflash_pack: aotpack.Pack, batch: int, context: int, anchors: int
) -> None:
    attention = dflash_pack.attention("full")
    case = make_case(attention.spec, batch, context, anchors)
    visible = visible_cells(attention.spec, case)
    expected = exact(attention.spec, case, visible)
    dense = exact(attention.spec, case, visible, torch.bfloat16)
    for name, found, right, other in zip(NAMES, run(attention, case), expected, dense, strict=True):
        assert not found.isnan().any(), name
        assert relative_error(found, right) <= relative_error(other, right), name


@pytest.mark.parametrize("name", list(MASKS))
@pytest.mark.parametrize(("batch", "context", "anchors"), [(1, 64, 1), (2, 150, 11), (2, 256, 24)])
def test_every_family_with_wide_values_and_own_scale(
    masks_pack: aotpack.Pack, name: str, batch: int, context: int, anchors: int
) -> None:
    attention = masks_pack.attention(name)
    case = make_case(attention.spec, batch, context, anchors)
    expected = exact(attention.spec, case, visible_cells(attention.spec, case))
    for part, found, right in zip(NAMES, run(attention, case), expected, strict=True):
        assert relative_error(found, right) < 1e-5, part


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_empty_rows_are_zero_and_minus_infinity(float32_pack: aotpack.Pack, keep: float) -> None:
    attention = float32_pack.attention("full")
    case = make_case(attention.spec, 2, 200, 12, keep=keep)
    out, lse, dq, dk, dv = run(attention, case)
    rows = case.mask["keep"].repeat_interleave(16, -1)[:, None].expand(lse.shape)
    assert not any(t.isnan().any() for t in (out, lse, dq, dk, dv))
    assert torch.equal(lse == -torch.inf, ~rows)
    assert out[~rows].abs().max() == 0
    assert dq[~rows].abs().max() == 0
    if keep == 0.0:
        assert dk.abs().max() == 0
        assert dv.abs().max() == 0


def test_anchors_and_context_change_on_every_call(float32_pack: aotpack.Pack) -> None:
    attention = float32_pack.attention("full")
    for step in range(12):
        case = make_case(attention.spec, 1 + step % 3, 40 + 37 * step, 1 + 5 * step % 17, seed=step)
        expected = exact(attention.spec, case, visible_cells(attention.spec, case))
        for name, found, right in zip(NAMES, run(attention, case), expected, strict=True):
            assert relative_error(found, right) < 1e-5, (step, name)
