"""Specs: canonical form, digest, and a whole message for each field that can be wrong."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from aotpack.errors import SpecError
from aotpack.spec import AttentionSpec, MaskSpec, differences

QWEN3_8B = AttentionSpec(
    heads=32,
    kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    mask=MaskSpec(family="dflash", block_size=16),
)


def spec(**changes: Any) -> AttentionSpec:
    return dataclasses.replace(QWEN3_8B, **changes)


def test_canonical_json_has_sorted_keys_no_spaces_and_no_absent_parameters():
    assert QWEN3_8B.to_json() == (
        '{"dtype":"bfloat16","head_dim":128,"heads":32,"kv_heads":8,"mask":{"block_size":16,"family":"dflash"},'
        '"scale":0.08838834764831845,"schema":"aotpack.spec/1","value_dim":128}'
    )


def test_digest_is_pinned_as_packages_are_found_by_it():
    assert QWEN3_8B.digest == "d20fc0423b42be36b93b85032fab063942598556438e1fe8a380109892c42252"


@pytest.mark.parametrize(
    "original",
    [
        QWEN3_8B,
        spec(mask=MaskSpec(family="dflash-speculators", block_size=8, window=2048, causal=False)),
        spec(kv_heads=32, head_dim=192, value_dim=128, scale=0.1147, dtype="float32"),
        spec(mask=MaskSpec(family="causal")),
    ],
    ids=["dflash", "speculators", "mla", "causal"],
)
def test_json_round_trip_keeps_the_spec_and_its_digest(original):
    again = AttentionSpec.from_dict(json.loads(original.to_json()))
    assert again == original
    assert again.digest == original.digest


def test_defaults_are_filled_in_so_that_they_have_one_digest():
    explicit = spec(value_dim=128, scale=128**-0.5)
    assert explicit == QWEN3_8B
    assert explicit.digest == QWEN3_8B.digest


def test_every_field_is_part_of_the_digest():
    changed = [
        spec(heads=16),
        spec(kv_heads=16),
        spec(head_dim=64, scale=QWEN3_8B.scale, value_dim=128),
        spec(value_dim=64),
        spec(dtype="float32"),
        spec(scale=1.0),
        spec(mask=MaskSpec(family="dflash", block_size=8)),
        spec(mask=MaskSpec(family="dflash", block_size=16, window=64)),
        spec(mask=MaskSpec(family="dflash-speculators", block_size=16)),
        spec(mask=MaskSpec(family="dflash-speculators", block_size=16, window=64, causal=True)),
    ]
    assert len({QWEN3_8B.digest, *(other.digest for other in changed)}) == len(changed) + 1


def test_group_size_is_query_heads_per_key_head():
    assert QWEN3_8B.group_size == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 0}, "spec field 'heads' is wrong\n  expected: a positive integer\n  found: 0"),
        ({"heads": True}, "spec field 'heads' is wrong\n  expected: a positive integer\n  found: True"),
        ({"kv_heads": "8"}, "spec field 'kv_heads' is wrong\n  expected: a positive integer\n  found: '8'"),
        ({"kv_heads": 5}, "spec field 'kv_heads' is wrong\n  expected: a divisor of heads=32\n  found: 5"),
        ({"head_dim": 1.5}, "spec field 'head_dim' is wrong\n  expected: a positive integer\n  found: 1.5"),
        ({"value_dim": -1}, "spec field 'value_dim' is wrong\n  expected: a positive integer\n  found: -1"),
        (
            {"dtype": "int8"},
            "spec field 'dtype' is wrong\n  expected: float32 or bfloat16 or float16\n  found: 'int8'",
        ),
        ({"scale": 0.0}, "spec field 'scale' is wrong\n  expected: a positive finite number\n  found: 0.0"),
        (
            {"scale": float("inf")},
            "spec field 'scale' is wrong\n  expected: a positive finite number\n  found: inf",
        ),
        ({"mask": "dflash"}, "spec field 'mask' is wrong\n  expected: a MaskSpec\n  found: 'dflash'"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_wrong_field_is_named_with_expected_and_found(changes, message):
    with pytest.raises(SpecError) as caught:
        spec(**changes)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"family": ""},
            "spec field 'mask.family' is wrong\n  expected: a mask family's name\n  found: ''",
        ),
        (
            {"family": "dflash", "block_size": 0},
            "spec field 'mask.block_size' is wrong\n  expected: a positive integer\n  found: 0",
        ),
        (
            {"family": "dflash", "window": "2048"},
            "spec field 'mask.window' is wrong\n  expected: a positive integer\n  found: '2048'",
        ),
        (
            {"family": "dflash", "causal": 1},
            "spec field 'mask.causal' is wrong\n  expected: true or false\n  found: 1",
        ),
    ],
    ids=["family", "block_size", "window", "causal"],
)
def test_a_wrong_mask_field_is_named_with_expected_and_found(fields, message):
    with pytest.raises(SpecError) as caught:
        MaskSpec(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema": "aotpack.spec/2"},
            (
                "spec field 'schema' is wrong\n  expected: aotpack.spec/1\n  found: 'aotpack.spec/2'\n"
                "  what to do: read it with the aotpack release that wrote it"
            ),
        ),
        (
            {"head_size": 128},
            (
                "spec field 'head_size' is wrong\n"
                "  expected: one of heads, kv_heads, head_dim, value_dim, dtype, scale, mask, score, "
                "matmul_precision, deterministic\n"
                "  found: 'head_size'\n  what to do: remove or rename it"
            ),
        ),
        (
            {"mask": {"family": "dflash", "blocks": 16}},
            (
                "spec field 'mask.blocks' is wrong\n"
                "  expected: one of family, block_size, window, causal, parts, inputs, source, graph\n"
                "  found: 'blocks'\n  what to do: remove or rename it"
            ),
        ),
        (
            {"mask": {"block_size": 16}},
            "spec field 'mask.family' is wrong\n  expected: a value\n  found: None\n  what to do: add it",
        ),
        (
            {"mask": None},
            "spec field 'mask' is wrong\n  expected: a table with the mask's family\n  found: None",
        ),
    ],
    ids=["schema", "unknown", "unknown-in-mask", "missing-in-mask", "no-mask"],
)
def test_from_dict_names_the_path_of_the_wrong_field(change, message):
    with pytest.raises(SpecError) as caught:
        AttentionSpec.from_dict({**QWEN3_8B.to_dict(), **change})
    assert str(caught.value) == message


def test_from_dict_asks_for_a_missing_field():
    data = QWEN3_8B.to_dict()
    del data["dtype"]
    with pytest.raises(SpecError) as caught:
        AttentionSpec.from_dict(data)
    assert str(caught.value) == (
        "spec field 'dtype' is wrong\n  expected: a value\n  found: None\n  what to do: add it"
    )


def test_differences_name_each_field_once_and_in_order():
    other = spec(heads=16, dtype="float32", mask=MaskSpec(family="dflash", block_size=8, window=2048))
    assert differences(QWEN3_8B, other) == [
        "heads: expected 32, found 16",
        "dtype: expected bfloat16, found float32",
        "mask.block_size: expected 16, found 8",
        "mask.window: expected None, found 2048",
    ]
    assert differences(QWEN3_8B, QWEN3_8B) == []


def test_spec_error_is_a_usage_error():
    assert SpecError.exit_code == 2


def test_precision_is_written_where_it_is_not_the_default():
    plain, fast = spec(dtype="float32"), spec(dtype="float32", matmul_precision="high")
    assert plain.matmul_precision == "highest"
    assert "matmul_precision" not in plain.to_dict()
    assert fast.to_dict()["matmul_precision"] == "high"
    assert AttentionSpec.from_dict(fast.to_dict()) == fast
    with pytest.raises(SpecError, match="matmul_precision"):
        spec(matmul_precision="high")
