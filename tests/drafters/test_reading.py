"""Every published drafter is read, fact for fact, from a config as its authors publish it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from aotpack.drafter import specs_from_config
from tests.drafters.facts import DRAFTERS, EXAMPLES, Drafter

EVERY = pytest.mark.parametrize("drafter", DRAFTERS, ids=lambda drafter: drafter.name)
LAYERS = {"full_attention": "full", "sliding_attention": "sliding"}


@EVERY
def test_every_fact_of_every_drafter(drafter: Drafter) -> None:
    found, expected = specs_from_config(drafter.source), drafter.specs
    assert list(found) == list(expected)
    for name, spec in found.items():
        mine, theirs = dataclasses.asdict(spec), dataclasses.asdict(expected[name])
        assert mine.pop("scale") == pytest.approx(theirs.pop("scale"), rel=1e-12)
        assert mine == theirs


@EVERY
def test_the_config_is_that_drafters(drafter: Drafter) -> None:
    config = json.loads(drafter.config.read_text())
    layers = config.get("transformer_layer_config", config)
    assert (layers["hidden_size"], layers["vocab_size"]) == (drafter.hidden_size, drafter.vocab_size)
    assert layers["num_hidden_layers"] == len(drafter.masks)
    if "layer_types" in layers:
        assert [LAYERS[kind] for kind in layers["layer_types"]] == [
            mask.removeprefix("speculators-") for mask in drafter.masks
        ]
    anchors = config.get("num_anchors", config.get("max_anchors"))
    assert anchors == drafter.num_anchors


def test_the_list_names_all_twenty_and_nothing_else() -> None:
    listed = (EXAMPLES / "drafters" / "README.md").read_text()
    assert all(f"`{drafter.name}`" in listed for drafter in DRAFTERS)
    folders = {path.name for path in (EXAMPLES / "drafters").iterdir() if path.is_dir()}
    assert folders < {drafter.name for drafter in DRAFTERS}
    assert len({drafter.name for drafter in DRAFTERS}) == 20


def test_a_spec_file_is_there_only_where_the_config_does_not_say_it() -> None:
    completed = {drafter.name for drafter in DRAFTERS if drafter.source.suffix == ".toml"}
    assert completed == {"torchspec-qwen3-8b-dflash", "torchspec-qwen3-8b-eagle3-mla"}
    for name in completed:
        config = json.loads((EXAMPLES / "drafters" / name / "config.json").read_text())
        assert not {"dtype", "torch_dtype"} & config.keys()


def test_the_twenty_differ_where_readers_go_wrong() -> None:
    facts = [spec for drafter in DRAFTERS for spec in drafter.specs.values()]
    assert {(64, 64), (128, 128), (256, 256), (192, 128)} == {(s.head_dim, s.value_dim) for s in facts}
    assert {14, 48, 56} <= {spec.heads for spec in facts}
    assert {spec.dtype for spec in facts} == {"bfloat16", "float16"}
    unlike = [d.name for d in DRAFTERS if d.heads * d.head_dim != d.hidden_size]
    assert {"kimi-k3-dspark", "glm-5.2-dspark", "gpt-oss-120b-eagle3", "qwen3-4b-dflash"} <= set(unlike)
    assert any(not math.isclose(s.scale, s.head_dim**-0.5) for s in facts)
