"""torch's BlockMask of every form on the CPU, against dense fp64 math and its own meaning cell by cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

import aotpack
from aotpack.errors import InputError, UnsupportedError
from aotpack.runtime.reblock import dense_cells
from aotpack.runtime.torch_mask import adopt
from tests.cases import NAMES, Case, exact, make_case, relative_error, visible_cells

Mod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
BATCH, HEADS, QUERY, KEY = 2, 6, 208, 333
TABLE = torch.rand(3, QUERY, KEY, generator=torch.Generator().manual_seed(3)) < 0.02
DOCUMENTS = torch.randint(0, 4, (3, KEY), generator=torch.Generator().manual_seed(4)).sort(-1).values
SIZES: list[Any] = [128, 64, 256, 1000, (128, 64), (64, 128), (256, 64), (96, 160), (1, 333), (7, 1)]


def by_table(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return TABLE[b, q, kv] | (kv < 130)


def by_document(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return DOCUMENTS[b, q] == DOCUMENTS[b, kv]


def causal(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
    return q >= kv


@pytest.fixture
def attention(masks_pack: aotpack.Pack) -> aotpack.Attention:
    return masks_pack.attention("everything")


def make(attention: aotpack.Attention, batch: int = BATCH) -> Case:
    return make_case(attention.spec, batch, KEY, QUERY // 16)


def cells(mod: Mod, batch: int, query: int = QUERY, key: int = KEY) -> Tensor:
    """bool [batch,1,query,key] of a mask_mod that broadcasts."""
    b = torch.arange(batch).view(-1, 1, 1, 1)
    found = mod(b, torch.tensor(0), torch.arange(query).view(-1, 1), torch.arange(key).view(1, -1))
    return found.expand(batch, 1, query, key)


def listed(
    count: Tensor | None, indices: Tensor | None, size: tuple[int, int], query: int, key: int
) -> Tensor:
    """bool [B,query,key] of the cells in the listed blocks of head 0, by loops."""
    assert count is not None
    assert indices is not None
    grid = torch.zeros(count.shape[0], query, key, dtype=torch.bool)
    for b in range(count.shape[0]):
        for row in range(count.shape[2]):
            for column in indices[b, 0, row, : int(count[b, 0, row])].tolist():
                rows = slice(row * size[0], (row + 1) * size[0])
                grid[b, rows, column * size[1] : (column + 1) * size[1]] = True
    return grid


def agrees(attention: aotpack.Attention, case: Case, mask: BlockMask, visible: Tensor) -> None:
    """Attention over the mask is dense fp64 attention over ``visible``, gradients included."""
    q, k, v = (t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    out, lse = attention(q, k, v, mask, return_lse=True)
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    found = (out, lse, q.grad, k.grad, v.grad)
    for name, tensor, right in zip(NAMES, found, exact(attention.spec, case, visible), strict=True):
        assert tensor is not None
        assert relative_error(tensor.detach(), right) < 1e-5, name


@pytest.mark.parametrize("mod", [by_table, by_document, causal])
@pytest.mark.parametrize("size", SIZES)
def test_every_block_size(attention: aotpack.Attention, size: Any, mod: Mod) -> None:
    case = make(attention)
    mask = create_block_mask(mod, BATCH, None, QUERY, KEY, device="cpu", BLOCK_SIZE=size)
    agrees(attention, case, mask, cells(mod, BATCH))


@pytest.mark.parametrize("size", [64, 128, 256, (128, 64)])
def test_reblocked_lists_and_tiles_are_those_of_our_own_mask(masks_pack: aotpack.Pack, size: Any) -> None:
    attention = masks_pack.attention("sliding")
    case = make_case(attention.spec, 2, 300, 41)
    visible = visible_cells(attention.spec, case)
    theirs = create_block_mask(
        lambda b, h, q, kv: visible[b, 0, q, kv], 2, None, *visible.shape[2:], device="cpu", BLOCK_SIZE=size
    )
    found = adopt(theirs, case.q, case.k)
    for tensor, right in zip(found.tensors, attention.block_mask(**case.mask).tensors, strict=True):
        assert tensor.dtype == right.dtype
        assert torch.equal(tensor, right)


@pytest.mark.parametrize("heads", [None, 1, HEADS])
def test_a_mask_of_one_entry_or_equal_heads(attention: aotpack.Attention, heads: int | None) -> None:
    case = make(attention)
    mask = create_block_mask(causal, None, heads, QUERY, KEY, device="cpu")
    agrees(attention, case, mask, cells(causal, 1).expand(BATCH, 1, QUERY, KEY))


def test_an_expanded_heads_axis(attention: aotpack.Attention) -> None:
    mask = create_block_mask(by_table, BATCH, None, QUERY, KEY, device="cpu")
    for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
        tensor = getattr(mask, name)
        setattr(mask, name, tensor.expand(-1, HEADS, *tensor.shape[2:]))
    agrees(attention, make(attention), mask, cells(by_table, BATCH))


def test_lists_of_one_entry_with_a_rule_for_each(attention: aotpack.Attention) -> None:
    everywhere = BlockMask.from_kv_blocks(
        torch.full((1, 1, 2), 3, dtype=torch.int32),
        torch.arange(3, dtype=torch.int32).expand(1, 1, 2, 3),
        mask_mod=by_table,
        seq_lengths=(QUERY, KEY),
    )
    agrees(attention, make(attention, 3), everywhere, cells(by_table, 3))


def test_lists_by_key_are_not_needed(attention: aotpack.Attention) -> None:
    whole = create_block_mask(by_document, BATCH, None, QUERY, KEY, device="cpu")
    mask = BlockMask.from_kv_blocks(
        whole.kv_num_blocks, whole.kv_indices, whole.full_kv_num_blocks, whole.full_kv_indices,
        mask_mod=by_document, seq_lengths=(QUERY, KEY), compute_q_blocks=False,
    )  # fmt: skip
    assert mask.q_indices is None
    agrees(attention, make(attention), mask, cells(by_document, BATCH))


def test_full_blocks_at_the_ends_of_the_axes_without_a_rule(attention: aotpack.Attention) -> None:
    count = torch.tensor([[[0, 0], [3, 1]]], dtype=torch.int32).transpose(0, 1)
    none = torch.zeros_like(count)
    order = torch.tensor([2, 0, 1], dtype=torch.int32).expand(2, 1, 2, 3)
    mask = BlockMask.from_kv_blocks(none, order, count, order, seq_lengths=(QUERY, KEY))
    visible = torch.zeros(2, 1, QUERY, KEY, dtype=torch.bool)
    visible[1, :, :128] = True
    visible[1, :, 128:, 256:] = True
    agrees(attention, make(attention), mask, visible)


def test_unlisted_blocks_are_hidden_and_full_ones_visible_whatever_the_rule_says(
    attention: aotpack.Attention,
) -> None:
    generator = torch.Generator().manual_seed(0)
    size = (64, 96)
    rows, columns = -(-QUERY // size[0]), -(-KEY // size[1])
    partial, full = (
        (
            torch.randint(0, columns + 1, (BATCH, 1, rows), generator=generator),
            torch.rand(BATCH, 1, rows, columns, generator=generator).argsort(-1),
        )
        for _ in range(2)
    )
    mask = BlockMask.from_kv_blocks(
        *partial, *full, BLOCK_SIZE=size, mask_mod=by_table, seq_lengths=(QUERY, KEY)
    )
    asked, whole = (listed(*lists, size, QUERY, KEY) for lists in (partial, full))
    visible = whole[:, None] | (asked[:, None] & cells(by_table, BATCH))
    agrees(attention, make(attention), mask, visible)


def test_a_rule_that_indexes_in_steps_is_called_for_one_cell(attention: aotpack.Attention) -> None:
    def chained(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return DOCUMENTS[b][q] == DOCUMENTS[b][kv]

    mask = create_block_mask(chained, BATCH, None, QUERY, KEY, device="cpu", BLOCK_SIZE=64)
    agrees(attention, make(attention), mask, cells(by_document, BATCH))


def test_the_eager_fallback_takes_it_too(attention: aotpack.Attention) -> None:
    eager = aotpack.Attention(attention.name, attention.spec, attention.device, None)
    mask = create_block_mask(by_table, BATCH, None, QUERY, KEY, device="cpu", BLOCK_SIZE=64)
    agrees(eager, make(attention), mask, cells(by_table, BATCH))


def test_a_sliced_mask_with_its_rule_again(attention: aotpack.Attention) -> None:
    mask = create_block_mask(by_document, 3, None, QUERY, KEY, device="cpu")[1:2]
    mask.mask_mod = lambda b, h, q, kv: by_document(b + 1, h, q, kv)
    agrees(attention, make(attention, 1), mask, cells(by_document, 2)[1:])


def test_heads_that_only_seem_to_matter(attention: aotpack.Attention) -> None:
    def reads(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (h >= 0)

    mask = create_block_mask(reads, BATCH, HEADS, QUERY, KEY, device="cpu")
    agrees(attention, make(attention), mask, cells(causal, BATCH))


@pytest.mark.parametrize("heads", [None, HEADS])
def test_a_mask_that_differs_between_heads_is_refused(
    attention: aotpack.Attention, heads: int | None
) -> None:
    def last_head_differs(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) | (h == HEADS - 1)

    case = make(attention)
    mask = create_block_mask(last_head_differs, BATCH, heads, QUERY, KEY, device="cpu")
    with pytest.raises(InputError, match="differs between heads") as refused:
        attention(case.q, case.k, case.v, mask)
    assert "H=None" in str(refused.value)


def test_other_devices_say_what_to_do() -> None:
    mask = create_block_mask(causal, None, None, QUERY, KEY, device="cpu")
    q = torch.empty(BATCH, HEADS, QUERY, 32, device="meta")
    with pytest.raises(UnsupportedError, match="on the CPU only") as refused:
        adopt(mask, q, q)
    assert "block_mask" in str(refused.value)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"seq_lengths": (QUERY, KEY - 1)}, "other lengths"),
        ({"seq_lengths": (QUERY + 1, KEY)}, "other lengths"),
        ({"BLOCK_SIZE": (64, 128)}, "wrong shape"),
        ({"BLOCK_SIZE": (128, 1024)}, "leaves the grid"),
        ({"BLOCK_SIZE": (128, 0)}, "BLOCK_SIZE is wrong"),
        ({"kv_num_blocks": torch.full((BATCH, 1, 2), -1)}, "kv_num_blocks leaves the grid"),
        ({"kv_num_blocks": torch.full((BATCH, 1, 2), 4)}, "kv_num_blocks leaves the grid"),
        ({"full_kv_num_blocks": torch.full((BATCH, 1, 2), 1 << 20)}, "full_kv_num_blocks leaves the grid"),
        ({"full_kv_indices": torch.full((BATCH, 1, 2, 3), -1)}, "full_kv_indices leaves the grid"),
        ({"kv_indices": torch.full((BATCH, 1, 2, 3), 3)}, "kv_indices leaves the grid"),
        ({"kv_indices": torch.zeros(BATCH, 1, 1, 3, dtype=torch.int32)}, "wrong shape"),
        ({"kv_num_blocks": torch.ones(BATCH, 1, 2)}, "no list of blocks"),
        ({"kv_num_blocks": torch.ones(BATCH, 1, 2, dtype=torch.int32, device="meta")}, "no list of blocks"),
        ({"mask_mod": lambda b, h, q, kv: q - kv}, "mask_mod does not say"),
        ({"mask_mod": lambda b, h, q, kv: (q >= kv).expand(2)}, "mask_mod does not say"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    attention: aotpack.Attention, change: dict[str, Any], problem: str
) -> None:
    case = make(attention)
    mask = BlockMask.from_kv_blocks(
        *(torch.full((BATCH, 1, 2), 2), torch.arange(3).expand(BATCH, 1, 2, 3)),
        *(torch.full((BATCH, 1, 2), 2), torch.arange(3).flip(0).expand(BATCH, 1, 2, 3)),
        mask_mod=causal,
        seq_lengths=(QUERY, KEY),
    )
    for name, value in change.items():
        setattr(mask, name, value)
    with pytest.raises(InputError, match=problem):
        attention(case.q, case.k, case.v, mask)


@pytest.mark.parametrize(("batch", "heads"), [(3, None), (None, 5), (None, 2)])
def test_another_batch_or_number_of_heads_is_refused(
    attention: aotpack.Attention, batch: int | None, heads: int | None
) -> None:
    case = make(attention)
    mask = create_block_mask(causal, batch, heads, QUERY, KEY, device="cpu")
    with pytest.raises(InputError, match="wrong shape"):
        attention(case.q, case.k, case.v, mask)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_lists_are_taken_exactly_or_refused(data: st.DataObject) -> None:
    query, key = data.draw(st.integers(1, 300), "query"), data.draw(st.integers(1, 300), "key")
    size = data.draw(st.tuples(st.integers(20, 300), st.integers(20, 300)), "size")
    batch, entries = 2, data.draw(st.sampled_from([1, 2]), "entries")
    rows, columns = -(-query // size[0]), -(-key // size[1])
    width = data.draw(st.integers(1, columns + 1), "width")
    slack = data.draw(st.sampled_from([0, 0, 1]), "slack")
    number = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30), "seed"))

    def lists() -> tuple[Tensor, Tensor]:
        count = torch.randint(-slack, width + 1 + slack, (entries, 1, rows), generator=number)
        index = torch.randint(-slack, columns + slack, (entries, 1, rows, width), generator=number)
        return count, index

    def rule(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q * 7 + kv * 3 + b) % 5 < 2

    both = [lists(), lists()]
    mask = BlockMask((query, key), *both[0], *both[1], None, None, None, None, BLOCK_SIZE=size, mask_mod=rule)
    q, k = torch.zeros(batch, 1, query, 1), torch.zeros(batch, 1, key, 1)
    inside = all(
        0 <= at <= width and all(0 <= i < columns for i in index[:at])
        for count, indices in both
        for at, index in zip(count.flatten().tolist(), indices.flatten(0, 2).tolist(), strict=True)
    )
    if not inside:
        with pytest.raises(InputError, match="leaves the grid"):
            adopt(mask, q, k)
        return
    found = adopt(mask, q, k)
    asked, whole = (listed(*each, size, query, key)[:, None] for each in both)
    right = (whole | (asked & cells(rule, batch, query, key))).expand(batch, 1, query, key)
    assert torch.equal(dense_cells(found.tensors, found.lengths).expand(batch, 1, query, key), right)
