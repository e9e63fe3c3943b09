"""Score functions: recorded with the tensors that they read, and answered with gradients into them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import aotpack
from aotpack.graph import Graph
from tests.recording.dense import attention, cells
from tests.recording.test_masks import causal

CELLS = ("score", "b", "h", "q", "kv")


class Bias(nn.Module):
    """A learned bias by distance and head, as a model holds it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(4, 65))

    def forward(self, score, b, h, q, kv):
        return score + self.table[h, (q - kv).clamp(-32, 32) + 32]


def cases():
    generator = torch.Generator().manual_seed(3)
    slopes = torch.rand(4, generator=generator, requires_grad=True)
    bias = torch.randn(2, 1, 50, 70, generator=generator)
    gate = torch.tensor(0.5, requires_grad=True)
    learned = Bias()

    def capped(score, b, h, q, kv):
        return 20.0 * torch.tanh(score / 20.0)

    def sloped(score, b, h, q, kv):
        return score - slopes[h] * (q - kv).abs()

    def added(score, b, h, q, kv):
        return score + bias[b][0][q][kv]

    def added_at_once(score, b, h, q, kv):
        return score + bias[b, 0, q, kv]

    def gated(score, b, h, q, kv):
        return torch.where(q >= kv, score * gate.sigmoid(), -float("inf")).to(score.dtype)

    def learned_bias(score, b, h, q, kv):
        return learned(score, b, h, q, kv)

    axes = {"slopes": ("H",), "bias": ("B", "X0", "Q", "K"), "gate": (), "table": ("H", "X0")}
    return [
        (capped, capped, {}, axes),
        (sloped, sloped, {"slopes": slopes}, axes),
        (added, added_at_once, {"bias": bias}, axes),
        (gated, gated, {"gate": gate}, axes),
        (learned_bias, learned_bias, {"table": learned.table}, axes),
    ]


@pytest.mark.parametrize(
    ("score_mod", "whole", "held", "axes"), cases(), ids=lambda x: getattr(x, "__name__", "")
)
def test_scores_are_recorded_and_answered(score_mod, whole, held, axes):
    generator = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(2, heads, length, 16, generator=generator, requires_grad=True)
        for heads, length in ((4, 50), (2, 70), (2, 70))
    )
    mask = create_block_mask(causal, 2, None, 50, 70, device="cpu")
    found = []
    captured = aotpack.capture(
        lambda: found.append(flex_attention(q, k, v, score_mod, mask, enable_gqa=True))
    )
    (spec,) = captured.values()
    assert spec.mask.family == "causal"
    assert spec.score.family == "recorded"
    assert {given.name: (given.dims, given.gradient) for given in spec.score.inputs or ()} == {
        name: (axes[name], tensor.requires_grad) for name, tensor in held.items()
    }
    right, _ = attention(q, k, v, 0.25, cells(causal, 2, 50, 70), whole)
    weight = torch.randn(right.shape, generator=generator)
    leaves = [q, k, v, *(tensor for tensor in held.values() if tensor.requires_grad)]
    torch.testing.assert_close(found[0], right, atol=1e-5, rtol=1e-5)
    gradients = torch.autograd.grad(found[0], leaves, weight)
    for gradient, reference in zip(gradients, torch.autograd.grad(right, leaves, weight), strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-4, rtol=1e-4)


def test_a_recorded_score_is_one_rule_for_single_cells_and_for_many():
    table = torch.randn(4, 65)

    def score_mod(score, b, h, q, kv):
        return score * 2 + table[h, (q - kv).clamp(-32, 32) + 32]

    captured = aotpack.capture(
        lambda: flex_attention(torch.zeros(1, 4, 20, 16), *[torch.zeros(1, 4, 30, 16)] * 2, score_mod)
    )
    score = captured["attention0"].score
    bound = Graph.parse(score.graph, score.inputs, CELLS).bind({"table": table})
    scores = torch.randn(1, 4, 20, 30)
    indices = [torch.arange(size) for size in scores.shape]
    whole = [index.view([-1 if i == axis else 1 for i in range(4)]) for axis, index in enumerate(indices)]
    together = bound(dict(zip(CELLS, (scores, *whole), strict=True)))
    single = lambda s, b, h, q, kv: bound(dict(zip(CELLS, (s, b, h, q, kv), strict=True)))  # noqa: E731
    for axis in (3, 2, 1, 0):
        dims = [0] + [0 if i == axis else None for i in range(4)]
        single = torch.vmap(single, in_dims=tuple(dims))
    torch.testing.assert_close(single(scores, *indices), together)


def test_a_score_function_that_changes_nothing_is_none():
    captured = aotpack.capture(
        lambda: flex_attention(*[torch.zeros(1, 2, 20, 16)] * 3, lambda score, b, h, q, kv: score + 0)
    )
    assert captured["full"].score is None
