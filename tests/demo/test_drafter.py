from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from aotpack.demo.data import MASK_TOKEN, Batch
from aotpack.demo.drafter import (
    DFlashAttention,
    Drafter,
    Target,
    block_loss,
    block_positions,
    block_tokens,
    drafter_config,
    drafting_loss,
    target_layer_ids,
)
from tests.demo.dense import TINY, DenseAttend

HIDDEN = 32


@pytest.fixture
def target() -> Target:
    torch.manual_seed(0)
    return Target(hidden_size=HIDDEN, layers=6, layer_ids=[1, 3])


@pytest.fixture
def drafter() -> Drafter:
    torch.manual_seed(1)
    return Drafter(drafter_config(TINY, hidden_size=HIDDEN, layers=2, target_layers=6))


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(2))
    loss_mask = torch.ones(2, 30, dtype=torch.bool)
    loss_mask[1, 20:] = False
    return Batch(tokens=tokens, loss_mask=loss_mask)


ANCHORS = torch.tensor([[0, 9, 28], [5, 18, 0]])
KEEP = torch.tensor([[True, True, True], [True, True, False]])


def test_context_counts_up_and_blocks_count_from_their_anchor():
    positions = block_positions(torch.tensor([[2, 5]]), context_len=6, block_size=3)
    assert positions.tolist() == [[0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 7]]


def test_a_block_shows_its_anchor_and_nothing_else():
    tokens = torch.tensor([[10, 11, 12, 13]])
    blocks = block_tokens(tokens, torch.tensor([[1, 3, 0]]), torch.tensor([[True, True, False]]), 2)
    assert blocks.tolist() == [[11, MASK_TOKEN, 13, MASK_TOKEN, MASK_TOKEN, MASK_TOKEN]]


@pytest.mark.parametrize(
    ("target_layers", "layers", "expected"),
    [(24, 5, [1, 6, 11, 16, 21]), (36, 5, [1, 9, 17, 25, 33]), (6, 2, [1, 3]), (6, 1, [3])],
)
def test_the_layers_that_a_drafter_listens_to_are_those_of_published_configs(target_layers, layers, expected):
    assert target_layer_ids(target_layers, layers) == expected


def test_the_target_gives_the_outputs_of_its_layers(target, batch):
    states = target.model(input_ids=batch.tokens, output_hidden_states=True).hidden_states
    assert torch.equal(target(batch.tokens), torch.cat([states[2], states[4]], dim=-1))


def test_the_loss_counts_known_tokens_after_each_kept_anchor(target, batch):
    size = 4
    hidden = torch.randn(2, 3 * size, HIDDEN, generator=torch.Generator().manual_seed(3))
    terms = []
    for row in range(2):
        for n, anchor in enumerate(ANCHORS[row].tolist()):
            for offset in range(1, size):
                position = anchor + offset
                if KEEP[row, n] and position < 30 and batch.loss_mask[row, position]:
                    logits = target.embedding.weight @ hidden[row, n * size + offset]
                    terms.append(functional.cross_entropy(logits, batch.tokens[row, position]))
    assert len(terms) == 3 + 3 + 1 + 3 + 1
    found = block_loss(hidden, target.embedding, batch, ANCHORS, KEEP)
    torch.testing.assert_close(found, torch.stack(terms).mean())


def draft(drafter: Drafter, target: Target, batch: Batch) -> torch.Tensor:
    attend = DenseAttend()
    mask = attend.block_mask(anchors=ANCHORS, keep=KEEP, context_len=30)
    blocks = target.embedding(block_tokens(batch.tokens, ANCHORS, KEEP, 4))
    positions = block_positions(ANCHORS, 30, 4)
    return drafter(blocks, target(batch.tokens), positions, attend, mask).unflatten(1, (3, 4))


def test_a_block_knows_nothing_from_after_its_anchor(drafter, target, batch):
    changed = batch.tokens.clone()
    changed[:, 10:] = 255 - changed[:, 10:]
    before = draft(drafter, target, batch)
    after = draft(drafter, target, Batch(tokens=changed, loss_mask=batch.loss_mask))
    torch.testing.assert_close(after[0, :2], before[0, :2])
    assert not torch.allclose(after[0, 2], before[0, 2])


def test_a_block_listens_to_the_context_before_its_anchor(drafter, target, batch):
    changed = batch.tokens.clone()
    changed[:, 8] = 255 - changed[:, 8]
    before = draft(drafter, target, batch)
    after = draft(drafter, target, Batch(tokens=changed, loss_mask=batch.loss_mask))
    torch.testing.assert_close(after[0, 0], before[0, 0])
    assert not torch.allclose(after[0, 1], before[0, 1])


def test_every_parameter_learns_and_the_target_does_not(drafter, target, batch):
    drafting_loss(drafter, target, DenseAttend(), batch, ANCHORS, KEEP).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in drafter.parameters())
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize(
    ("package", "tolerance"), [("float32_pack", 1e-5), ("dflash_pack", 2e-2)], ids=["float32", "bfloat16"]
)
def test_the_attention_module_has_the_gradients_of_dense_math(request, package, tolerance):
    attend = request.getfixturevalue(package).attention("full")
    torch.manual_seed(4)
    config = drafter_config(attend.spec, hidden_size=64, layers=1, target_layers=6)
    module = DFlashAttention(config)
    anchors, keep = torch.tensor([[3, 40, 90], [7, 0, 0]]), torch.tensor([[True] * 3, [True, False, False]])
    blocks, context = torch.randn(2, 48, 64), torch.randn(2, 100, 64)
    positions = block_positions(anchors, 100, 16)
    angles = positions[..., None] / 10 ** torch.linspace(0, 4, 32).repeat(2)
    rotary = angles.cos(), angles.sin()
    weight = torch.randn(2, 48, 64)

    def gradients(call, dtype: torch.dtype) -> list[torch.Tensor]:
        module.to(dtype).zero_grad()
        inputs = [x.detach().clone().to(dtype).requires_grad_() for x in (blocks, context)]
        mask = call.block_mask(anchors=anchors, keep=keep, context_len=100)
        out = module(*inputs, tuple(x.to(dtype) for x in rotary), call, mask)
        out.backward(weight.to(dtype))
        return [out.detach(), *(x.grad for x in (*inputs, *module.parameters()))]

    class Exact(DenseAttend):
        def __call__(self, q, k, v, mask):
            return super().__call__(q.double(), k.double(), v.double(), mask)

    found = gradients(attend, torch.float32)
    exact = gradients(Exact(attend.spec), torch.float64)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()
