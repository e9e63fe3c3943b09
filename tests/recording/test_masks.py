"""Recorded masks show the cells that torch's own evaluation of the function shows."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

import aotpack
from aotpack.masks import Lengths, dense
from aotpack.spec import MaskSpec
from tests.recording.dense import cells

WINDOW = 50


def capture_mask(mask_mod, batch, query, key):
    """The one spec and call of an attention with this mask."""
    tensors = [torch.zeros(batch, 2, length, 16) for length in (query, key, key)]

    def model():
        mask = create_block_mask(mask_mod, batch, None, query, key, device="cpu")
        return flex_attention(*tensors, block_mask=mask)

    captured = aotpack.capture(model)
    (spec,) = captured.values()
    return spec, captured.calls[0]


def check(mask_mod, tensors, batch, query, key):
    """Compares a captured mask cell by cell, and returns its spec.

    ``tensors`` are those that the function closes over, by the names of the variables.
    """
    spec, call = capture_mask(mask_mod, batch, query, key)
    inputs = {name: tensors[held] for name, held in call.tensors.items()}
    found = dense(spec.mask, inputs, Lengths(batch=batch, query=query, key=key))
    assert torch.equal(found, cells(mask_mod, batch, query, key))
    return spec.mask


def causal(b, h, q, kv):
    return kv <= q


def sliding(window):
    return lambda b, h, q, kv: kv > q - window


class Segments:
    """A mask function that is an object."""

    def __init__(self, segments, offset):
        self.segments = segments
        self.offset = offset
        self.query_length = 40

    def __call__(self, b, h, q, kv):
        return self.segments[b, q] >= self.segments[b, kv] - self.offset

    def method(self, b, h, q, kv):
        return self(b, h, q, kv)


def draft(anchors, keep, context, block_size, window=None):
    """The rule of a trainer of DFlash drafters, with the context length as a tensor or as a number."""

    def dflash_mask(b, h, q, kv):
        block = q // block_size
        anchor = anchors[b, block]
        before = (kv < context) & (kv < anchor)
        if window is not None:
            before = before & (kv >= anchor + q % block_size - (window - 1))
        own = (kv >= context) & ((kv - context) // block_size == block)
        return (before | own) & keep[b, block]

    return dflash_mask


@pytest.fixture
def random():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(
    ("mask_mod", "expected"),
    [
        (causal, MaskSpec(family="causal")),
        (lambda b, h, q, kv: q + 1 > kv, MaskSpec(family="causal")),
        (lambda b, h, q, kv: ~(kv > q), None),
        (lambda b, h, q, kv: q >= 0, MaskSpec(family="full")),
        (lambda b, h, q, kv: q.new_ones((), dtype=torch.bool), MaskSpec(family="full")),
        (and_masks(sliding(WINDOW), causal), MaskSpec(family="sliding", window=WINDOW)),
        (lambda b, h, q, kv: (q >= kv) & (q - kv < 50), MaskSpec(family="sliding", window=WINDOW)),
        (lambda b, h, q, kv: (q - kv <= 49) & (q - kv >= 0), MaskSpec(family="sliding", window=WINDOW)),
        (lambda b, h, q, kv: (q - kv).abs() < 50, None),
        (or_masks(causal, lambda b, h, q, kv: kv < 7), None),
        (lambda b, h, q, kv: torch.where(q % 2 == 0, kv // 3 * 3 <= q, kv.clamp(5, 60) <= q), None),
        (lambda b, h, q, kv: torch.logical_and(q, kv) | (5 - q.float() / 2 >= kv**2), None),
        (lambda b, h, q, kv: (b + q) % 3 != kv % 3, None),
        (functools.partial(lambda limit, b, h, q, kv: (q * 31 + kv * 17) % 64 < limit, 20), None),
    ],
)
@pytest.mark.parametrize(("batch", "query", "key"), [(1, 130, 130), (2, 77, 201)])
def test_rules_without_tensors(mask_mod, expected, batch, query, key):
    found = check(mask_mod, {}, batch, query, key)
    if expected is not None:
        assert found == expected
    else:
        assert found.family == "recorded"


@pytest.mark.parametrize("window", [None, 12])
def test_a_draft_mask_with_its_context_length_as_a_tensor(random, window):
    context = torch.tensor(100)
    anchors = torch.randint(0, 100, (2, 5), generator=random)
    keep = torch.rand(2, 5, generator=random) < 0.7
    tensors = {"anchors": anchors, "keep": keep, "context": context}
    found = check(draft(anchors, keep, context, 16, window), tensors, 2, 80, 180)
    assert [(given.name, given.dtype, given.dims) for given in found.inputs or ()] == [
        ("anchors", "int64", ("B", "X0")),
        ("context", "int64", ()),
        ("keep", "bool", ("B", "X1")),
    ]
    # The graph is the rule for other lengths too.
    longer = torch.tensor(171)
    anchors, keep = torch.randint(0, 171, (3, 7), generator=random), torch.ones(3, 7, dtype=torch.bool)
    inputs = {"anchors": anchors, "keep": keep, "context": longer}
    visible = dense(found, inputs, Lengths(batch=3, query=112, key=283))
    assert torch.equal(visible, cells(draft(anchors, keep, longer, 16, window), 3, 112, 283))


def test_one_rule_written_twice_is_one_graph(random):
    keys = torch.rand(2, 140, generator=random) < 0.5
    one, _ = capture_mask(lambda b, h, q, kv: keys[b, kv] & (kv < q + 3), 2, 90, 140)
    other, _ = capture_mask(lambda b, h, q, kv: (3 + q > kv) & keys[b][kv], 2, 90, 140)
    assert one == other


def test_axes_follow_the_index(random):
    keys = torch.rand(2, 140, generator=random) < 0.5
    rows = torch.rand(90, generator=random) < 0.8
    padded = torch.rand(2, 256, generator=random) < 0.8
    held = {"keys": keys, "rows": rows, "padded": padded}

    def mask_mod(b, h, q, kv):
        return (keys[b, kv] & rows[q]) | padded[b, kv]

    spec, call = capture_mask(mask_mod, 2, 90, 140)
    assert {given.name: given.dims for given in spec.mask.inputs or ()} == {
        "keys": ("B", "K"),
        "padded": ("B", "X0"),
        "rows": ("Q",),
    }
    assert call.tensors == {"keys": "keys", "padded": "padded", "rows": "rows"}
    found = dense(spec.mask, {name: held[name] for name in call.tensors}, Lengths(batch=2, query=90, key=140))
    reference = (keys[:, None, None, :] & rows[:, None]) | padded[:, None, None, :140]
    assert torch.equal(found, reference)


def test_documents_are_recognised(random):
    segments = torch.randint(0, 4, (2, 130), generator=random).sort(-1).values

    def same(b, h, q, kv):
        return segments[b, q] == segments[b, kv]

    assert check(and_masks(causal, same), {"segments": segments}, 2, 130, 130) == MaskSpec(family="document")
    windowed = check(and_masks(causal, same, sliding(WINDOW)), {"segments": segments}, 2, 130, 130)
    assert windowed == MaskSpec(
        family="and", parts=(MaskSpec(family="document"), MaskSpec(family="sliding", window=WINDOW))
    )
    alone = check(same, {"segments": segments}, 2, 130, 130)
    assert alone.family == "recorded"
    assert [given.dims for given in alone.inputs or ()] == [("B", "Q")]


def test_documents_of_another_dtype_keep_it(random):
    segments = torch.randint(0, 4, (2, 130), generator=random).sort(-1).values.to(torch.int32)

    def mask_mod(b, h, q, kv):
        return (segments[b, q] == segments[b, kv]) & (q >= kv)

    found = check(mask_mod, {"segments": segments}, 2, 130, 130)
    assert [given.dtype for given in found.inputs or ()] == ["int32"]


def test_a_prefix_is_recognised(random):
    starts = torch.randint(0, 90, (3,), generator=random)
    found = check(lambda b, h, q, kv: (q >= kv) | (kv < starts[b]), {"starts": starts}, 3, 90, 140)
    assert found == MaskSpec(family="prefix")


def test_objects_and_methods_are_walked(random):
    segments = torch.randint(0, 4, (2, 60), generator=random)
    for function in (rule := Segments(segments, 1), functools.partial(rule.method)):
        # query_length is an attribute that the function does not read, so it is nobody's number.
        found = check(function, {"segments": segments}, 2, 60, 60)
        assert [given.name for given in found.inputs or ()] == ["segments"]


def test_names_are_unique_and_none_of_block_masks_own(random):
    context_len = torch.tensor(20)
    parts = [torch.rand(2, 60, generator=random) < 0.5 for _ in range(2)]

    def each(keys):
        return lambda b, h, q, kv: keys[b, kv]

    spec, call = capture_mask(
        and_masks(each(parts[0]), each(parts[1]), lambda b, h, q, kv: kv < context_len), 2, 50, 60
    )
    assert sorted(given.name for given in spec.mask.inputs or ()) == ["context_len_1", "keys", "keys_1"]
    assert sorted(call.tensors) == ["context_len_1", "keys", "keys_1"]
