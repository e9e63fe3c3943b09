"""Steps as trainers make them: an EAGLE-3 unroll, two masks in one step, unusual groups and head sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import aotpack
from aotpack.dense import dense_attention
from aotpack.spec import AttentionSpec, MaskSpec
from tests.cases import NAMES, exact, make_case, relative_error, run, visible_cells
from tests.conftest import DFLASH, build_once
from tests.masks_drawn import visible

EAGLE3 = MaskSpec(family="eagle3")
STEPS = 7


def unrolled(attend, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> Tensor:
    """The sum over all steps of an EAGLE-3 unroll: step k sees the keys of every earlier step."""
    total = torch.zeros((), dtype=q[0].dtype)
    for step in range(STEPS):
        keys, values = torch.cat(k[: step + 1], 2), torch.cat(v[: step + 1], 2)
        out = attend(step, q[step], keys, values)
        total = total + (out * (step + 1)).sin().sum()
    return total


def test_seven_steps_of_eagle3_with_gradients_through_all(masks_pack: aotpack.Pack) -> None:
    attention = masks_pack.attention("eagle3")
    spec, query = attention.spec, 75
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([75, 41])

    def draw(heads: int, size: int) -> list[Tensor]:
        return [torch.randn(2, heads, query, size, generator=generator) for _ in range(STEPS)]

    q, k, v = draw(spec.heads, spec.head_dim), draw(spec.kv_heads, spec.head_dim), draw(spec.kv_heads, 48)

    def ours(step: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = attention.block_mask(
            lengths=(lengths - step).clamp(min=0), query_len=query, context_len=(step + 1) * query
        )
        return attention(q, k, v, mask)

    def dense(step: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cells = visible(EAGLE3, {"lengths": (lengths - step).clamp(min=0)}, query, (step + 1) * query)
        return dense_attention(q, k, v, cells, spec.scale)[0]

    found = [[t.clone().requires_grad_() for t in part] for part in (q, k, v)]
    right = [[t.double().requires_grad_() for t in part] for part in (q, k, v)]
    ours_total, right_total = unrolled(ours, *found), unrolled(dense, *right)
    ours_total.backward()
    right_total.backward()
    assert abs(float(ours_total) - float(right_total)) < 1e-4 * abs(float(right_total))
    for part, expected in zip(found, right, strict=True):
        for step, (one, other) in enumerate(zip(part, expected, strict=True)):
            assert one.grad is not None
            assert other.grad is not None
            assert relative_error(one.grad, other.grad) < 1e-5, step


def test_two_masks_in_one_step_share_a_backward(masks_pack: aotpack.Pack) -> None:
    full, sliding = masks_pack.attention("full"), masks_pack.attention("sliding")
    case = make_case(full.spec, 2, 300, 11)
    masks = full.block_mask(**case.mask), sliding.block_mask(**case.mask)
    leaves = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
    out = full(*leaves, masks[0])
    sliding(leaves[0] + out[..., :32], *leaves[1:], masks[1]).backward(case.grad_out)

    exact_leaves = [t.double().requires_grad_() for t in (case.q, case.k, case.v)]
    cells = [visible(a.spec.mask, case.mask, case.q.shape[2], case.key_length) for a in (full, sliding)]
    first = dense_attention(*exact_leaves, cells[0], full.spec.scale)[0]
    second = dense_attention(exact_leaves[0] + first[..., :32], *exact_leaves[1:], cells[1], full.spec.scale)[
        0
    ]
    second.backward(case.grad_out.double())
    for leaf, right in zip(leaves, exact_leaves, strict=True):
        assert leaf.grad is not None
        assert right.grad is not None
        assert relative_error(leaf.grad, right.grad) < 1e-5


@pytest.fixture(scope="session")
def sizes_pack(built: Path) -> aotpack.Pack:
    """Head sizes 80 and 96, groups of four and six query heads; the other tests have three and seven."""
    specs = {
        "80": AttentionSpec(heads=8, kv_heads=2, head_dim=80, dtype="float32", mask=DFLASH),
        "96": AttentionSpec(heads=6, kv_heads=1, head_dim=96, dtype="bfloat16", mask=DFLASH),
    }
    return aotpack.load(build_once(built, "sizes", specs))


def test_head_size_80_in_groups_of_four(sizes_pack: aotpack.Pack) -> None:
    attention = sizes_pack.attention("80")
    for batch, context, anchors in ((1, 1, 1), (2, 77, 9), (1, 640, 16)):
        case = make_case(attention.spec, batch, context, anchors)
        expected = exact(attention.spec, case, visible_cells(attention.spec, case))
        for name, found, right in zip(NAMES, run(attention, case), expected, strict=True):
            assert relative_error(found, right) < 1e-5, name


def test_head_size_96_in_groups_of_six_in_bfloat16(sizes_pack: aotpack.Pack) -> None:
    attention = sizes_pack.attention("96")
    case = make_case(attention.spec, 2, 300, 21)
    visible_here = visible_cells(attention.spec, case)
    expected = exact(attention.spec, case, visible_here)
    dense = exact(attention.spec, case, visible_here, torch.bfloat16)
    for name, found, right, other in zip(NAMES, run(attention, case), expected, dense, strict=True):
        assert relative_error(found, right) <= relative_error(other, right), name


def test_one_row_and_one_key(masks_pack: aotpack.Pack) -> None:
    attention = masks_pack.attention("causal")
    q, k, v = torch.randn(1, 6, 1, 32), torch.randn(1, 2, 1, 32), torch.randn(1, 2, 1, 48)
    out = attention(q, k, v, attention.block_mask(query_len=1, context_len=1))
    assert torch.allclose(out, v.repeat_interleave(3, 1))


def test_mixed_dtypes_outside_autocast_are_refused_and_inside_they_are_cast(
    masks_pack: aotpack.Pack, sizes_pack: aotpack.Pack
) -> None:
    attention = sizes_pack.attention("96")
    case = make_case(attention.spec, 1, 50, 3)
    mask = attention.block_mask(**case.mask)
    with pytest.raises(aotpack.AotpackError, match="q has the wrong dtype"):
        attention(case.q.float(), case.k, case.v, mask)
    leaves = [case.q.float().requires_grad_(), case.k.float().requires_grad_(), case.v.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(*leaves, mask)
    out.backward(case.grad_out)
    assert out.dtype == torch.bfloat16
    assert [leaf.grad.dtype for leaf in leaves] == [torch.float32, torch.float32, torch.bfloat16]
    # Another autocast than the package's is no licence to cast.
    with torch.autocast("cpu", torch.float16), pytest.raises(aotpack.AotpackError, match="wrong dtype"):
        attention(*leaves, mask)
