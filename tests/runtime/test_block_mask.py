"""The block-mask program against torch's create_block_mask and an independent evaluation of the rules."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import aotpack
from aotpack.errors import AotpackError
from aotpack.masks import Lengths, dense, family_of, intervals
from aotpack.spec import AttentionSpec, MaskSpec
from tests.cases import make_case, visible_cells
from tests.conftest import DFLASH, MASKS, MORE_MASKS, SMALL

NAMES = list(MASKS)
SHAPES = [(1, 64, 1), (2, 129, 7), (3, 777, 131), (1, 1500, 33), (2, 256, 24)]
LISTS = [
    "kv_num_blocks",
    "kv_indices",
    "full_kv_num_blocks",
    "full_kv_indices",
    "q_num_blocks",
    "q_indices",
    "full_q_num_blocks",
    "full_q_indices",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("batch", "context", "anchors"), SHAPES)
def test_lists_equal_create_block_mask(
    masks_pack: aotpack.Pack, name: str, batch: int, context: int, anchors: int
) -> None:
    attention = masks_pack.attention(name)
    case = make_case(attention.spec, batch, context, anchors)
    visible = visible_cells(attention.spec, case)
    query, key = visible.shape[2:]
    expected = create_block_mask(
        lambda b, h, q, kv: visible[b, 0, q, kv], visible.shape[0], None, query, key, device="cpu"
    )
    found = attention.block_mask(**case.mask)
    for tensor, part in zip(found.tensors, LISTS, strict=False):
        assert torch.equal(tensor, getattr(expected, part)), part


@pytest.mark.parametrize("name", [*MASKS, *MORE_MASKS])
def test_rules_equal_an_independent_evaluation(name: str) -> None:
    spec = AttentionSpec(dtype="float32", mask={**MASKS, **MORE_MASKS}[name], **SMALL)
    for seed, (batch, context, anchors) in enumerate(SHAPES):
        case = make_case(spec, batch, context, anchors, seed=seed)
        expected = visible_cells(spec, case)
        inputs = {n: t for n, t in case.mask.items() if isinstance(t, torch.Tensor)}
        lengths = Lengths(batch=expected.shape[0], query=expected.shape[2], key=expected.shape[3])
        assert torch.equal(dense(spec.mask, inputs, lengths), expected)


# What rows see there depends on values of document_ids, real, depth: they are no intervals.
NO_INTERVALS = {
    "speculators", "speculators-2048", "speculators-sliding", "eagle3-sliding", "eagle3-speculators",
    "peagle", "document", "padded", "packed-window",
}  # fmt: skip
JOINED = {
    "dflash-in-window": MaskSpec(family="and", parts=(DFLASH, MaskSpec(family="sliding", window=40))),
    "eagle3-in-chunks": MaskSpec(
        family="and", parts=(MaskSpec(family="eagle3"), MaskSpec(family="chunked", window=60))
    ),
    "three": MaskSpec(
        family="or",
        parts=(
            MaskSpec(family="and", parts=(MaskSpec(family="prefix"), MaskSpec(family="chunked", window=33))),
            MaskSpec(family="sliding", window=7),
            MaskSpec(family="and", parts=(MaskSpec(family="full"), MaskSpec(family="prefix"))),
        ),
    ),
}


@pytest.mark.parametrize("name", [*MASKS, *MORE_MASKS, *JOINED])
def test_intervals_are_what_the_rule_shows(name: str) -> None:
    mask = {**MASKS, **MORE_MASKS, **JOINED}[name]
    spec = AttentionSpec(dtype="float32", mask=mask, **SMALL)
    for seed, (batch, context, anchors) in enumerate(SHAPES):
        case = make_case(spec, batch, context, anchors, seed=seed)
        query, key = case.q.shape[2], case.key_length
        inputs = {n: t for n, t in case.mask.items() if isinstance(t, torch.Tensor)}
        entries = batch if family_of(mask).batched else 1
        lengths = Lengths(batch=entries, query=query, key=key)
        ends = intervals(mask, inputs, lengths)
        assert (ends is None) == (name in NO_INTERVALS)
        if ends is not None:
            low, high = (end.unsqueeze(-1) for end in ends)
            seen = ((torch.arange(key) >= low) & (torch.arange(key) < high)).any(2).unsqueeze(1)
            assert torch.equal(seen, dense(mask, inputs, lengths))


def test_tiles_hold_the_cells_of_partial_blocks(masks_pack: aotpack.Pack) -> None:
    attention = masks_pack.attention("sliding")
    case = make_case(attention.spec, 2, 300, 21)
    visible = visible_cells(attention.spec, case)[:, 0]
    *lists, tiles, ids = attention.block_mask(**case.mask).tensors
    padded = torch.zeros(2, 128 * ids.shape[2], 128 * ids.shape[3], dtype=torch.bool)
    padded[:, : visible.shape[1], : visible.shape[2]] = visible
    for b in range(2):
        for row in range(ids.shape[2]):
            for column in lists[1][b, 0, row, : lists[0][b, 0, row]].tolist():
                cells = padded[b, row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
                assert torch.equal(unpacked(tiles[ids[b, 0, row, column]]), cells)


@pytest.mark.parametrize("form", ["bytes", "bool", "int8", "short"])
def test_tiles_of_another_form_are_an_error_of_the_call(masks_pack: aotpack.Pack, form: str) -> None:
    attention = masks_pack.attention("causal")
    case = make_case(attention.spec, 1, 200, 9)
    *lists, tiles, ids = attention.block_mask(**case.mask).tensors
    others = {
        "bytes": torch.ones(len(tiles), 128, 128, dtype=torch.uint8),
        "bool": torch.ones(len(tiles), 128, 128, dtype=torch.bool),
        "int8": tiles.view(torch.int8),
        "short": tiles[:-1],
    }
    assert len(tiles) == 3
    with pytest.raises(AotpackError, match="a compiled program failed to run"):
        torch.ops.aotpack.attention(attention._key, case.q, case.k, case.v, [*lists, others[form], ids])


def test_counts_past_the_end_of_a_list_are_an_error_of_the_call(masks_pack: aotpack.Pack) -> None:
    attention = masks_pack.attention("causal")
    case = make_case(attention.spec, 1, 200, 9)
    count, *others = attention.block_mask(**case.mask).tensors
    with pytest.raises(AotpackError, match="a compiled program failed to run"):
        torch.ops.aotpack.attention(attention._key, case.q, case.k, case.v, [count + 100, *others])


def unpacked(tile: torch.Tensor) -> torch.Tensor:
    """bool [128,128] of uint8 [128,16], bit by bit."""
    assert tile.dtype == torch.uint8
    assert tile.shape == (128, 16)
    bits = [[byte >> bit & 1 == 1 for byte in row for bit in range(8)] for row in tile.tolist()]
    return torch.tensor(bits)
