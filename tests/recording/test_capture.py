"""aotpack.capture on plain modules: what it records, what it answers, what it refuses, and what it leaves."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    create_block_mask,
    flex_attention,
    noop_mask,
)

import aotpack
from aotpack.errors import HostError, SpecError, UnsupportedError
from aotpack.recording.interception import intercepted
from aotpack.spec import AttentionSpec, MaskSpec
from tests.recording.dense import attention, cells
from tests.recording.test_masks import causal, draft

CODE = flex_attention.__code__
compiled_flex = torch.compile(flex_attention)
compiled_block_mask = torch.compile(create_block_mask)


class Layer(nn.Module):
    """Attention of 4 query heads and 2 key heads of 16, as a trainer writes it."""

    def __init__(self, flex=flex_attention):
        super().__init__()
        self.qkv = nn.Linear(64, 128)
        self.flex = flex

    def forward(self, x, mask=None, **options):
        q, k, v = self.qkv(x).unflatten(-1, (8, 16)).transpose(1, 2).split((4, 2, 2), 1)
        return self.flex(q, k, v, block_mask=mask, enable_gqa=True, **options)


def spec(mask, **fields):
    return AttentionSpec(heads=4, kv_heads=2, head_dim=16, dtype="float32", mask=mask, **fields)


def tensors(*, batch=2, query=80, key=180, heads=4, kv_heads=2, size=16, dtype=torch.float32):
    shapes = ((heads, query), (kv_heads, key), (kv_heads, key))
    return [torch.randn(batch, *shape, size).to(dtype) for shape in shapes]


def masked(mask_mod, batch=2, query=80, key=180):
    return create_block_mask(mask_mod, batch, None, query, key, device="cpu")


def test_a_module_is_recorded_with_its_calls():
    x = torch.randn(2, 70, 64)
    captured = aotpack.capture(Layer(), x, mask=masked(causal, 2, 70, 70), scale=0.3)
    assert dict(captured) == {"causal": spec(MaskSpec(family="causal"), scale=0.3)}
    (call,) = captured.calls
    assert (call.spec, call.batch, call.query_len, call.key_len) == ("causal", 2, 70, 70)
    assert call.return_lse is False


def test_two_masks_in_one_step_and_equal_layers():
    layers = nn.ModuleList([Layer(compiled_flex) for _ in range(4)])

    def step(x):
        full = compiled_block_mask(causal, 2, None, 70, 70, device="cpu")
        near = compiled_block_mask(
            lambda b, h, q, kv: (q >= kv) & (q - kv < 20), 2, None, 70, 70, device="cpu"
        )
        for i, layer in enumerate(layers):
            x = x + layer(x, near if i % 2 else full).transpose(1, 2).flatten(2)
        return x.sum().backward()

    captured = aotpack.capture(step, torch.randn(2, 70, 64))
    assert dict(captured) == {
        "causal": spec(MaskSpec(family="causal")),
        "sliding": spec(MaskSpec(family="sliding", window=20)),
    }
    assert [call.spec for call in captured.calls] == ["causal", "sliding"] * 2
    assert all(layer.qkv.weight.grad is not None for layer in layers)


def test_recorded_masks_are_numbered():
    def model():
        q, k, v = tensors()
        for _ in range(2):
            flex_attention(q, k, v, block_mask=masked(lambda b, h, q, kv: q % 3 == kv % 3), enable_gqa=True)
            flex_attention(q, k, v, block_mask=masked(lambda b, h, q, kv: q // 4 == kv // 4), enable_gqa=True)
        flex_attention(q, k, v, enable_gqa=True)

    captured = aotpack.capture(model)
    assert list(captured) == ["attention0", "attention1", "full"]
    assert [call.spec for call in captured.calls] == [*["attention0", "attention1"] * 2, "full"]


@pytest.mark.parametrize("ask", [{"return_lse": True}, {"return_aux": AuxRequest(lse=True)}, {}])
def test_the_model_gets_dense_results_and_gradients(ask):
    q, k, v = (t.double().float().requires_grad_() for t in tensors())
    anchors, keep = (
        torch.tensor([[10, 30, 50, 70, 90]] * 2),
        torch.tensor([[True, True, False, True, False]] * 2),
    )
    mask_mod = draft(anchors, keep, torch.tensor(100), 16)
    found = []
    captured = aotpack.capture(
        lambda: found.append(
            flex_attention(q, k, v, block_mask=masked(mask_mod), enable_gqa=True, scale=0.2, **ask)
        )
    )
    out = found[0][0] if ask else found[0]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right, right_lse = attention(*exact, 0.2, cells(mask_mod, 2, 80, 180))
    weight = torch.randn_like(right)
    (out * weight).sum().backward()
    (right * weight).sum().backward()
    torch.testing.assert_close(out.double(), right, atol=1e-5, rtol=1e-5)
    for tensor, reference in zip((q, k, v), exact, strict=True):
        torch.testing.assert_close(tensor.grad.double(), reference.grad, atol=1e-5, rtol=1e-5)
    if ask:
        lse = found[0][1] if "return_lse" in ask else found[0][1].lse
        torch.testing.assert_close(lse.double(), right_lse, atol=1e-5, rtol=1e-5)
    assert captured.calls[0].return_lse is bool(ask)


def test_fake_tensors_and_the_meta_device():
    def step(layer, x):
        mask = create_block_mask(causal, 2, None, 70, 70, device=x.device)
        layer(x, mask).sum().backward()

    with FakeTensorMode():
        fake = aotpack.capture(step, Layer(), torch.randn(2, 70, 64))
    with torch.device("meta"):
        meta = aotpack.capture(step, Layer(), torch.randn(2, 70, 64))
    assert dict(fake) == dict(meta) == {"causal": spec(MaskSpec(family="causal"))}


def test_fake_tensors_with_tensors_in_the_mask():
    with FakeTensorMode():
        anchors, keep, context = torch.zeros(2, 5).long(), torch.ones(2, 5).bool(), torch.zeros(()).long()
        q, k, v = (t.requires_grad_() for t in tensors())

        def step():
            mask = masked(draft(anchors, keep, context, 16))
            flex_attention(q, k, v, block_mask=mask, enable_gqa=True).sum().backward()

        captured = aotpack.capture(step)
    names = [given.name for given in captured["attention0"].mask.inputs or ()]
    assert names == ["anchors", "context", "keep"]
    assert q.grad is not None


def test_autocast_decides_the_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        captured = aotpack.capture(lambda: flex_attention(*tensors(), enable_gqa=True))
    assert captured["full"].dtype == "bfloat16"


def test_a_context_length_as_a_number_is_refused():
    anchors, keep = torch.zeros(2, 5).long(), torch.ones(2, 5).bool()
    mask = masked(draft(anchors, keep, 100, 16))
    with pytest.raises(SpecError) as error:
        aotpack.capture(lambda: flex_attention(*tensors(), block_mask=mask, enable_gqa=True))
    assert str(error.value).split("\n  ") == [
        "the function 'draft.<locals>.dflash_mask' closes over the Python number 'context', which changes",
        "expected: a number that is the same in every step, or a tensor",
        "found: context = 100, which is the difference of the key length and the query length",
        (
            "what to do: close over a tensor instead, context = torch.tensor(context), which becomes an input"
            " of the mask; or write the rule as module:function, which may ask for query_len and key_len; or,"
            " if every value is to be a spec of its own, capture(..., static_numbers=['context'])"
        ),
    ]


def test_a_number_that_changes_in_an_unroll_is_refused():
    def diagonal(step):
        return lambda b, h, q, kv: (q >= kv) | (kv - q == 11 * step)

    def unroll(x):
        for step in range(3):
            flex_attention(*tensors(), block_mask=masked(diagonal(step)), enable_gqa=True)

    with pytest.raises(SpecError) as error:
        aotpack.capture(unroll, None)
    assert "closes over the Python number 'step'" in str(error.value)
    assert "found: step = 0 in one call and 1 in another" in str(error.value)
    captured = aotpack.capture(unroll, None, static_numbers=["step"])
    assert len(captured) == 3


def test_a_number_that_a_function_takes_from_a_shape_is_refused():
    documents = torch.zeros(97, dtype=torch.int64)

    def mask_mod(b, h, q, kv):
        return documents[kv.clamp(max=documents.shape[0] - 1)] == documents[q]

    with pytest.raises(SpecError, match="computes a Python number that changes") as error:
        aotpack.capture(lambda: flex_attention(*tensors(), block_mask=masked(mask_mod), enable_gqa=True))
    assert error.value.found == "96, which is one less than the size of axis 0 of 'documents'"


def refused(call, problem):
    with pytest.raises(SpecError, match=problem):
        aotpack.capture(call)
    assert flex_attention.__code__ is CODE


def test_masks_that_no_package_has_are_refused():
    q, k, v = tensors()
    table = torch.ones(80, 180).bool()

    def with_mask(mask):
        return lambda: flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    heads = create_block_mask(lambda b, h, q, kv: h * 9 + q >= kv, 2, 4, 80, 180, device="cpu")
    refused(with_mask(heads), "differs between heads")
    lists = masked(lambda b, h, q, kv: kv < 100)
    other = BlockMask.from_kv_blocks(lists.kv_num_blocks, lists.kv_indices, seq_lengths=(80, 180))
    assert other.mask_mod is noop_mask
    refused(with_mask(other), "the BlockMask's blocks are not those of its mask function 'noop_mask'")
    refused(with_mask(masked(causal, 2, 80, 181)), "made for other lengths")
    whole = masked(lambda b, h, q, kv: table.sum() > q)
    refused(with_mask(whole), "computes with the whole tensor 'table'")
    sliced = masked(lambda b, h, q, kv: table[q][kv])
    assert aotpack.capture(with_mask(sliced))["attention0"].mask.inputs[0].dims == ("Q", "K")
    softmax = masked(lambda b, h, q, kv: q.float().softmax(0) > 0)
    refused(with_mask(softmax), "calls aten._softmax.default, which cannot be recorded")
    short = torch.ones(1, 180).bool()
    refused(
        with_mask(create_block_mask(lambda b, h, q, kv: short[b, kv], 1, None, 80, 180, device="cpu")),
        "reads the tensor 'short' past its end",
    )


def test_a_function_that_looks_at_a_value_is_refused():
    q, k, v = tensors()

    def score_mod(score, b, h, q, kv):
        return score if q > kv else -score

    refused(lambda: flex_attention(q, k, v, score_mod, enable_gqa=True), "reads the value of a tensor")


@pytest.mark.parametrize(
    ("change", "options", "expected"),
    [
        ({}, {"enable_gqa": False}, "query heads that are the key heads"),
        ({}, {"kernel_options": {"PRESCALE_QK": True}}, "kernel options that change speed alone"),
        ({}, {"kernel_options": {"BACKEND": "FLASH"}}, "kernel options that change speed alone"),
        ({}, {"return_aux": AuxRequest(max_scores=True)}, "no auxiliary output but the log-sum-exp"),
        ({"dtype": torch.float64}, {}, "float32 or bfloat16 or float16"),
        ({"kv_heads": 3}, {}, "query heads that are the key heads"),
    ],
)
def test_calls_that_no_package_has_are_refused(change, options, expected):
    with pytest.raises(SpecError) as error:
        aotpack.capture(lambda: flex_attention(*tensors(**change), **{"enable_gqa": True, **options}))
    assert str(error.value.expected).startswith(expected)


def test_head_sizes_and_dtypes_that_differ_are_refused():
    (q, k, v), (small, *_), (half, *_) = tensors(), tensors(size=8), tensors(dtype=torch.float16)
    refused(lambda: flex_attention(small, k, v, enable_gqa=True), "in a way that no package has")
    refused(lambda: flex_attention(half, k, v, enable_gqa=True), "in a way that no package has")
    refused(lambda: flex_attention(q[:1], k, v, enable_gqa=True), "in a way that no package has")


def test_options_that_change_speed_alone_are_noted():
    options = {"BLOCK_M": 64, "num_warps": 4}
    captured = aotpack.capture(lambda: flex_attention(*tensors(), enable_gqa=True, kernel_options=options))
    assert captured.calls[0].kernel_options == options


def test_a_model_without_flex_attention_says_so():
    with pytest.raises(SpecError, match="the model called no flex_attention") as error:
        aotpack.capture(nn.Linear(3, 3), torch.randn(3))
    assert 'attn_implementation="flex_attention"' in str(error.value)


def test_nothing_is_left_behind_after_an_exception():
    def model():
        flex_attention(*tensors(), enable_gqa=True)
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            aotpack.capture(model)
        assert flex_attention.__code__ is CODE
    # torch's own again, which on the CPU has no gradients.
    with torch.no_grad():
        q, k, v = (t.expand(-1, 4, -1, -1) for t in tensors(kv_heads=1))
        right, _ = attention(q, k, v, 0.25, None)
        torch.testing.assert_close(flex_attention(q, k, v), right, atol=1e-4, rtol=1e-4)
    aotpack.capture(lambda: flex_attention(*tensors(), enable_gqa=True))


def test_a_capture_inside_or_beside_another_is_refused():
    with pytest.raises(UnsupportedError, match="a capture is running already"):
        aotpack.capture(lambda: aotpack.capture(lambda: None))
    problems = []

    def other():
        try:
            aotpack.capture(lambda: None)
        except UnsupportedError as error:
            problems.append(error)

    def model():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        flex_attention(*tensors(), enable_gqa=True)

    assert list(aotpack.capture(model)) == ["full"]
    assert len(problems) == 1


def test_torch_still_has_the_flex_attention_that_is_intercepted():
    """Fails when torch changes the signature, wraps the function or forbids to exchange its code."""
    assert list(inspect.signature(torch_flex.flex_attention).parameters) == [
        *("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse"),
        *("kernel_options", "return_aux"),
    ]
    seen = {}
    with intercepted(lambda **arguments: seen.update(arguments)):
        assert torch_flex.flex_attention.__code__ is not CODE
        flex_attention(1, 2, 3, scale=0.5)
        assert seen["query"] == 1
        assert seen["scale"] == 0.5
        torch.compile(flex_attention)(4, 5, 6)
        assert seen["query"] == 4
    assert torch_flex.flex_attention.__code__ is CODE


def test_another_signature_is_refused(monkeypatch):
    def flex(query, key, value, dropout=0.0):
        return query

    monkeypatch.setattr(torch_flex, "flex_attention", flex)
    with pytest.raises(HostError, match="another flex_attention") as error:
        aotpack.capture(lambda: None)
    assert "dropout=0.0" in str(error.value)
    monkeypatch.undo()
    assert list(aotpack.capture(lambda: flex_attention(*tensors(), enable_gqa=True))) == ["full"]
