"""A transformers model with flex_attention: its specs, and the package that is built of them."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import Qwen3Config, Qwen3ForCausalLM

import aotpack
from aotpack.spec import MaskSpec
from tests.cases import relative_error
from tests.conftest import build_once
from tests.recording.dense import attention, cells
from tests.recording.test_masks import draft

BATCH, LENGTH, WINDOW = 2, 70, 24
HEADS = {"heads": 4, "kv_heads": 2, "head_dim": 32}


def qwen3():
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=HEADS["heads"],
        num_key_value_heads=HEADS["kv_heads"],
        head_dim=HEADS["head_dim"],
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=2,
        attn_implementation="flex_attention",
    )
    return Qwen3ForCausalLM(config)


def padding():
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[1, 50:] = 0
    return mask


def packed():
    return torch.cat([torch.arange(30), torch.arange(LENGTH - 30)]).expand(BATCH, -1)


def training_step(use_cache=False, **inputs):
    model, ids = qwen3(), torch.zeros(BATCH, LENGTH, dtype=torch.int64)

    def step():
        model(ids, labels=ids, use_cache=use_cache, **inputs).loss.backward()

    captured = aotpack.capture(step)
    assert all(weight.grad is not None for weight in model.parameters())
    return captured


def test_full_and_sliding_layers_are_two_named_specs():
    captured = training_step()
    assert {name: spec.mask for name, spec in captured.items()} == {
        "causal": MaskSpec(family="causal"),
        "sliding": MaskSpec(family="sliding", window=WINDOW),
    }
    assert [call.spec for call in captured.calls] == ["causal", "causal", "sliding", "sliding"]
    assert all((spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 32) for spec in captured.values())
    assert all(spec.score is None for spec in captured.values())
    with FakeTensorMode():
        # With a cache, because transformers cannot see in fake positions that nothing is packed.
        assert dict(training_step(use_cache=True)) == dict(captured)


def test_padding_and_packing_become_inputs():
    padded = training_step(attention_mask=padding())
    assert [given.to_dict() for given in padded["attention0"].mask.inputs or ()] == [
        {"name": "padding_mask", "dtype": "bool", "dims": ["B", "K"]}
    ]
    positions = training_step(position_ids=packed())
    assert [given.to_dict() for given in positions["attention0"].mask.inputs or ()] == [
        {"name": "packed_sequence_mask", "dtype": "int64", "dims": ["B", "Q"]},
        {"name": "position_ids", "dtype": "int64", "dims": ["B", "Q"]},
    ]
    assert len(padded) == len(positions) == 2


def drafter():
    """A drafter's step, whose context length is a tensor."""
    q, k = torch.randn(2, 4, 80, 32), torch.randn(2, 2, 180, 32)
    mask_mod = draft(torch.zeros(2, 5).long(), torch.ones(2, 5).bool(), torch.tensor(100), 16)
    flex_attention(
        q, k, k, block_mask=create_block_mask(mask_mod, 2, None, 80, 180, device="cpu"), enable_gqa=True
    )


@pytest.fixture(scope="module")
def pack(built):
    """A package for the CPU of two recorded masks."""
    return packed_up(
        built,
        "recorded",
        {
            "packed": training_step(position_ids=packed())["attention0"],
            "draft": aotpack.capture(drafter)["attention0"],
        },
    )


def packed_up(built, name, specs):
    """A loaded package of recorded specs."""
    loaded = aotpack.load(build_once(built, name, specs))
    loaded.require(specs)
    return loaded


def compare(attend, mask, visible, query, key, batch):
    """Compiled attention against dense fp64 math, gradients included."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (
        torch.randn(batch, heads, length, 32, generator=generator, requires_grad=True)
        for heads, length in ((4, query), (2, key), (2, key))
    )
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out, lse = attend(q, k, v, mask, return_lse=True)
    right, right_lse = attention(*exact, 32**-0.5, visible)
    grad_out, grad_lse = (
        torch.randn(out.shape, generator=generator),
        torch.randn(lse.shape, generator=generator),
    )
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    weight = torch.where(right_lse.isneginf(), 0, grad_lse.double())
    torch.autograd.backward([right, right_lse], [grad_out.double(), weight])
    assert relative_error(out.detach(), right.detach()) < 1e-5
    assert relative_error(lse.detach(), right_lse.detach()) < 1e-5
    for tensor, reference in zip((q, k, v), exact, strict=True):
        assert relative_error(tensor.grad, reference.grad) < 1e-5


@pytest.mark.slow
def test_a_padded_sliding_mask_that_was_built(built):
    spec = training_step(attention_mask=padding())["attention1"]
    pack = packed_up(built, "recorded-padded", {"padded": spec})
    generator = torch.Generator().manual_seed(6)
    for batch, length in ((2, 70), (3, 300)):
        keys = torch.rand(batch, length, generator=generator) < 0.7
        attend = pack.attention("padded")
        mask = attend.block_mask(padding_mask=keys, query_len=length)

        def mask_mod(b, h, q, kv, keys=keys):
            return (q >= kv) & (q - kv < WINDOW) & keys[b, kv]

        compare(attend, mask, cells(mask_mod, batch, length, length), length, length, batch)


def test_a_packed_mask_that_was_built(pack):
    length = 261
    positions = torch.cat([torch.arange(100), torch.arange(30), torch.arange(131)]).expand(2, -1)
    documents = (positions == 0).long().cumsum(-1)
    attend = pack.attention("packed")
    mask = attend.block_mask(position_ids=positions.contiguous(), packed_sequence_mask=documents)

    def mask_mod(b, h, q, kv):
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    compare(attend, mask, cells(mask_mod, 2, length, length), length, length, 2)


def test_a_draft_mask_that_was_built(pack):
    generator = torch.Generator().manual_seed(7)
    for batch, blocks, context in ((1, 5, 100), (2, 17, 411)):
        anchors = torch.randint(0, context, (batch, blocks), generator=generator)
        keep = torch.rand(batch, blocks, generator=generator) < 0.7
        held = {"anchors": anchors, "keep": keep, "context": torch.tensor(context)}
        query, key = 16 * blocks, context + 16 * blocks
        attend = pack.attention("draft")
        mask = attend.block_mask(**held, query_len=query, context_len=key)
        visible = cells(draft(anchors, keep, held["context"], 16), batch, query, key)
        compare(attend, mask, visible, query, key, batch)
