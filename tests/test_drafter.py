"""Reading drafters: real configs, their variants, spec files, and live modules."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aotpack.drafter import specs_from_config, specs_from_module
from aotpack.errors import SpecError, UnsupportedError
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec

EXAMPLES = Path(__file__).parent.parent / "examples"
FULL = MaskSpec(family="dflash", block_size=16)
SLIDING = MaskSpec(family="dflash", block_size=16, window=2048)


def qwen3(**changes: Any) -> dict[str, Any]:
    """A DFlash config.json; a change to None removes the key."""
    config = {
        "architectures": ["DFlashDraftModel"],
        "block_size": 16,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "layer_types": ["full_attention"] * 2,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 2,
        "num_key_value_heads": 8,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 512,
    }
    return {k: v for k, v in {**config, **changes}.items() if v is not None}


def only(specs: dict[str, AttentionSpec], name: str = "full") -> AttentionSpec:
    assert list(specs) == [name]
    return specs[name]


def attention(heads: int, kv_heads: int, head_dim: int, mask: MaskSpec = FULL, **more: Any) -> AttentionSpec:
    return AttentionSpec(
        **{
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "dtype": "bfloat16",
            "mask": mask,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("example", "expected"),
    [
        ("qwen3-8b-dflash/config.json", {"full": attention(32, 8, 128)}),
        ("qwen3-8b-dflash", {"full": attention(32, 8, 128)}),
        ("qwen2.5-0.5b-dflash/config.json", {"full": attention(14, 2, 64)}),
        ("qwen2.5-0.5b-dflash/float32.toml", {"full": attention(14, 2, 64, dtype="float32")}),
        (
            "qwen3.6-27b-dflash/config.json",
            {"sliding": attention(32, 8, 128, SLIDING), "full": attention(32, 8, 128)},
        ),
    ],
)
def test_shipped_drafters_read_exactly(example, expected):
    assert specs_from_config(EXAMPLES / example) == expected
    assert specs_from_config(str(EXAMPLES / example)) == expected


@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "head_dim", "block_size"),
    [
        pytest.param(2560, 32, 8, 128, 16, id="qwen3-4b-dflash"),
        pytest.param(2048, 32, 4, 128, 16, id="qwen3.5-35b-a3b-dflash"),
        pytest.param(2048, 32, 8, 64, 16, id="lfm2.5-1.2b-instruct-dflash"),
        pytest.param(6144, 32, 8, 128, 16, id="longcat-flash-dflash"),
        pytest.param(4096, 32, 8, 128, 16, id="qwen3-8b-domino"),
        pytest.param(4096, 32, 8, 128, 7, id="qwen3-8b-dspark"),
        pytest.param(7168, 64, 16, 64, 7, id="kimi-k3-dspark"),
        pytest.param(6144, 64, 16, 64, 7, id="glm-5.2-dspark"),
    ],
)
def test_published_dflash_drafters_read_exactly(hidden, heads, kv_heads, head_dim, block_size):
    config = qwen3(
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    mask = MaskSpec(family="dflash", block_size=block_size)
    assert specs_from_config(config) == {"full": attention(heads, kv_heads, head_dim, mask)}


def test_torchspec_config_gets_the_rest_from_a_spec_file(tmp_path):
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "dflash",
        "hidden_size": 4096,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "spec.toml").write_text(
        'config = "config.json"\n[mask]\nblock_size = 16\n[attention]\ndtype = "bfloat16"\n'
    )
    assert specs_from_config(tmp_path / "spec.toml") == {"full": attention(32, 8, 128)}


class TestVariants:
    def test_missing_head_dim_is_hidden_over_heads(self):
        config = qwen3(head_dim=None, model_type="qwen2", hidden_size=896, num_attention_heads=14)
        config["num_key_value_heads"] = 2
        assert only(specs_from_config(config)) == attention(14, 2, 64)

    def test_missing_head_dim_with_another_class_default_warns(self):
        config = qwen3(head_dim=None, hidden_size=2048)
        with pytest.warns(UserWarning, match="read as hidden_size / heads = 64; Qwen3Config would take 128"):
            assert only(specs_from_config(config)).head_dim == 64

    def test_null_head_dim_is_a_missing_one(self):
        assert only(specs_from_config({**qwen3(), "head_dim": None})).head_dim == 128

    def test_head_dim_that_is_there_is_never_computed(self):
        assert only(specs_from_config(qwen3(hidden_size=5120))).head_dim == 128

    def test_torch_dtype_of_older_configs(self):
        assert only(specs_from_config(qwen3(dtype=None, torch_dtype="float16"))).dtype == "float16"

    def test_sliding_window_without_sliding_layers_is_not_used(self):
        specs = specs_from_config(qwen3(sliding_window=2048, use_sliding_window=True))
        assert only(specs).mask.window is None

    def test_layer_types_decide_and_not_use_sliding_window(self):
        types = ["sliding_attention", "full_attention"]
        specs = specs_from_config(qwen3(layer_types=types, sliding_window=2048))
        assert specs == {"sliding": attention(32, 8, 128, SLIDING), "full": attention(32, 8, 128)}

    def test_block_size_in_dflash_config(self):
        config = qwen3(block_size=None, dflash_config={"block_size": 8})
        assert only(specs_from_config(config)).mask.block_size == 8

    def test_text_config_of_a_multimodal_one(self):
        text = qwen3(model_type="qwen3_vl_text", block_size=None, layer_types=None)
        config = {"model_type": "qwen3_vl", "block_size": 16, "dtype": "bfloat16", "text_config": text}
        assert only(specs_from_config(config)) == attention(32, 8, 128)

    def test_mla_has_its_own_value_dim_and_scale(self):
        config = qwen3(
            model_type="deepseek_v3",
            num_attention_heads=16,
            num_key_value_heads=None,
            head_dim=None,
            layer_types=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            rope_scaling={
                "type": "yarn",
                "factor": 40.0,
                "mscale_all_dim": 0.707,
                "original_max_position_embeddings": 4096,
            },
        )
        mscale = 0.1 * 0.707 * math.log(40) + 1
        expected = attention(16, 16, 192, value_dim=128, scale=192**-0.5 * mscale**2)
        assert only(specs_from_config(config)) == expected

    def test_mla_without_yarn_scales_by_the_query_key_dim(self):
        config = qwen3(
            num_key_value_heads=1,
            head_dim=192,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        )
        assert only(specs_from_config(config)) == attention(32, 32, 192, value_dim=128)

    def test_speculators_config(self):
        layers = qwen3(
            architectures=None,
            block_size=None,
            layer_types=["sliding_attention"] * 2,
            sliding_window=2048,
            use_sliding_window=True,
        )
        config = {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "block_size": 16,
            "draft_vocab_size": 32000,
            "transformer_layer_config": layers,
        }
        mask = MaskSpec(family="dflash-speculators", block_size=16, window=2048, causal=True)
        assert only(specs_from_config(config), "sliding") == attention(32, 8, 128, mask)
        config["sliding_window_non_causal"] = True
        assert only(specs_from_config(config), "sliding").mask.causal is False
        full = {**config, "layer_types": ["full_attention"] * 2}
        assert only(specs_from_config(full)).mask == MaskSpec(family="dflash-speculators", block_size=16)

    @pytest.mark.parametrize("kind", ["eagle3", "eagle-3"])
    def test_speculators_eagle3_has_a_rule_of_its_own(self, kind):
        layers = qwen3(architectures=None, block_size=None, layer_types=None, model_type="llama")
        config = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": kind,
            "draft_vocab_size": 32000,
            "transformer_layer_config": layers,
        }
        mask = MaskSpec(family="eagle3-speculators")
        assert only(specs_from_config(config), "eagle3") == attention(32, 8, 128, mask)

    def test_sliding_layers_of_a_speculators_eagle3(self):
        types = ["sliding_attention", "full_attention"]
        layers = qwen3(architectures=None, block_size=None, layer_types=types, sliding_window=512)
        config = {"speculators_model_type": "eagle3", "transformer_layer_config": layers}
        family = "eagle3-speculators"
        assert specs_from_config(config) == {
            "sliding": attention(32, 8, 128, MaskSpec(family=family, window=512)),
            "eagle3": attention(32, 8, 128, MaskSpec(family=family)),
        }

    def test_speculators_peagle(self):
        layers = qwen3(architectures=None, block_size=None, layer_types=None)
        config = {"speculators_model_type": "peagle", "transformer_layer_config": layers}
        assert only(specs_from_config(config), "peagle").mask == MaskSpec(family="peagle")

    @pytest.mark.parametrize(
        "changes",
        [
            {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000},
            {"architectures": None, "draft_vocab_size": 32000},
            {"architectures": ["LlamaForCausalLMEagle3"], "sliding_window": 32768, "max_window_layers": 28},
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                "target_model_type": "qwen3_vl",
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_section": [24, 20, 20],
                    "mrope_interleaved": True,
                },
            },
        ],
        ids=["named", "unnamed", "unused-window", "multimodal-target"],
    )
    def test_eagle3_configs(self, changes):
        config = qwen3(block_size=None, layer_types=None, model_type="llama", **changes)
        mask = MaskSpec(family="eagle3")
        assert only(specs_from_config(config), "eagle3") == attention(32, 8, 128, mask)

    def test_eagle3_of_a_multimodal_config_whose_class_has_no_head_dim(self):
        text = {
            "model_type": "qwen2_5_vl_text", "hidden_size": 3584, "intermediate_size": 18944,
            "vocab_size": 512, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 1,
            "sliding_window": 32768, "use_sliding_window": False,
        }  # fmt: skip
        config = {
            "architectures": ["Qwen2_5_VLForCausalLMEagle3"], "model_type": "qwen2_5_vl",
            "torch_dtype": "bfloat16", "text_config": text,
            "vision_config": {"model_type": "qwen2_5_vl", "hidden_size": 1280},
        }  # fmt: skip
        mask = MaskSpec(family="eagle3")
        assert only(specs_from_config(config), "eagle3") == attention(28, 4, 128, mask)

    def test_dtype_wins_over_torch_dtype(self):
        assert only(specs_from_config(qwen3(torch_dtype="float16"))).dtype == "bfloat16"

    def test_a_live_transformers_config(self):
        from transformers import Qwen3Config

        config = Qwen3Config.from_dict(qwen3())
        assert only(specs_from_config(config)) == attention(32, 8, 128)

    def test_arguments_win_over_the_config(self):
        specs = specs_from_config(qwen3(), block_size=8, dtype="float32", scale=0.5)
        expected = attention(32, 8, 128, MaskSpec(family="dflash", block_size=8), dtype="float32", scale=0.5)
        assert specs == {"full": expected}

    def test_another_family_for_a_config_that_is_no_drafter(self):
        specs = specs_from_config(qwen3(architectures=["Qwen3ForCausalLM"], block_size=None), family="causal")
        assert specs == {"causal": attention(32, 8, 128, MaskSpec(family="causal"))}

    @pytest.mark.parametrize("family", ["document", "prefix", "causal", "full", "eagle3", "peagle"])
    def test_a_family_without_parameters(self, family):
        specs = specs_from_config(qwen3(), family=family)
        assert specs == {family: attention(32, 8, 128, MaskSpec(family=family))}

    def test_a_sliding_window_of_plain_sequences(self):
        specs = specs_from_config(qwen3(), family="sliding", window=64)
        assert specs == {"sliding": attention(32, 8, 128, MaskSpec(family="sliding", window=64))}
        config = qwen3(layer_types=["sliding_attention"] * 2, sliding_window=2048)
        assert only(specs_from_config(config, family="sliding"), "sliding").mask.window == 2048
        assert "'sliding_window' is missing" in message(SpecError, qwen3(), family="sliding")

    def test_a_family_without_a_window_refuses_sliding_layers(self):
        config = qwen3(layer_types=["sliding_attention"] * 2, sliding_window=2048)
        assert "mask family 'document' has no window" in message(UnsupportedError, config, family="document")

    def test_the_mapping_is_not_changed(self):
        config = {**qwen3(), "head_dim": None}
        before = copy.deepcopy(config)
        specs_from_config(config)
        assert config == before


def test_families_are_those_of_the_masks():
    from aotpack.drafter.masks import FAMILY_PARAMETERS
    from aotpack.masks import FAMILIES

    assert {name: set(parameters) for name, parameters in FAMILY_PARAMETERS.items()} == {
        name: family.required | family.optional for name, family in FAMILIES.items()
    }


def message(error: type[Exception], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(error) as caught:
        specs_from_config(*args, **kwargs)
    assert caught.value.exit_code == 2
    return str(caught.value)


REMEDY = "add it to the config, or say it in a TOML spec file"
SPEC_FILE = 'write a TOML spec file: config = "config.json" and [mask] family = "dflash", block_size = 16'


class TestErrors:
    def test_a_config_that_is_not_a_drafters(self):
        config = qwen3(architectures=["Qwen3ForCausalLM"], block_size=None)
        assert message(SpecError, config) == (
            "drafter config: this is not a drafter\n"
            "  expected: 'block_size', at the top or in 'dflash_config', or 'speculators_model_type'\n"
            "  found: model_type 'qwen3' with architectures ['Qwen3ForCausalLM']\n"
            f"  what to do: give the drafter's config, not the target's, or {SPEC_FILE}"
        )

    def test_a_dflash_config_without_block_size(self):
        assert message(SpecError, qwen3(block_size=None)) == (
            "drafter config: a dflash drafter without a block size\n"
            "  expected: 'block_size', at the top or in 'dflash_config'\n"
            "  found: neither\n"
            f"  what to do: add it, or {SPEC_FILE}"
        )

    @pytest.mark.parametrize(
        ("changes", "family"),
        [
            ({"architectures": ["LlamaForCausalLMEagle"]}, "eagle"),
            ({"architectures": ["MedusaModel"]}, "medusa"),
            ({"architectures": None, "speculators_model_type": "mtp"}, "mtp"),
        ],
    )
    def test_a_family_that_is_not_known_is_named(self, changes, family):
        assert message(UnsupportedError, qwen3(block_size=None, **changes)) == (
            f"drafter config: drafters of the family '{family}' are not supported\n"
            "  expected: dflash or dflash-speculators or eagle3 or eagle3-speculators or peagle or causal or "
            "sliding or chunked or document or padding or prefix or full\n"
            f"  found: {family}\n"
            "  what to do: say another mask family in a TOML spec file"
        )

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            (
                {"num_attention_heads": None},
                f"'num_attention_heads' is missing\n  expected: a positive integer\n  what to do: {REMEDY}",
            ),
            (
                {"num_attention_heads": "32"},
                "'num_attention_heads' is wrong\n  expected: a positive integer\n  found: '32'",
            ),
            (
                {"num_key_value_heads": None, "num_attention_heads": 14},
                f"'num_key_value_heads' is missing\n  expected: a positive integer\n  what to do: {REMEDY}",
            ),
            (
                {"num_key_value_heads": 5},
                "spec field 'kv_heads' is wrong\n  expected: a divisor of heads=32\n  found: 5",
            ),
            ({"head_dim": 0}, "'head_dim' is wrong\n  expected: a positive integer\n  found: 0"),
            (
                {"head_dim": None, "hidden_size": 4097},
                (
                    "'head_dim' is missing\n  "
                    "expected: a value, as 32 heads do not divide hidden_size 4097\n  "
                    f"what to do: {REMEDY}"
                ),
            ),
            ({"block_size": 16.0}, "'block_size' is wrong\n  expected: a positive integer\n  found: 16.0"),
            ({"dflash_config": [16]}, "'dflash_config' is wrong\n  expected: an object\n  found: [16]"),
            (
                {"dtype": None},
                f"'dtype' is missing\n  expected: float32 or bfloat16 or float16\n  what to do: {REMEDY}",
            ),
            (
                {"dtype": "int3"},
                "spec field 'dtype' is wrong\n  expected: float32 or bfloat16 or float16\n  found: 'int3'",
            ),
            (
                {"layer_types": ["sliding_attention"] * 2},
                (
                    "'sliding_window' is missing\n  "
                    "expected: the window of the sliding layers in tokens\n  "
                    f"what to do: {REMEDY}"
                ),
            ),
        ],
        ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
    )
    def test_a_wrong_field_is_named(self, changes, text):
        assert message(SpecError, qwen3(**changes)) == f"drafter config: {text}"

    def test_what_transformers_refuses_is_our_error(self):
        text = message(SpecError, qwen3(layer_types=["full_attention"] * 3))
        assert text.startswith(
            "drafter config: transformers cannot read it\n  expected: a valid config of model_type 'qwen3'"
        )
        assert "`num_hidden_layers` (2) must be equal to the number of `layer_types` (3)" in text

    @pytest.mark.parametrize(
        ("changes", "found"),
        [
            ({"layer_types": ["linear_attention", "full_attention"]}, "linear_attention"),
            ({"attn_logit_softcapping": 30.0}, "30.0"),
            ({"dflash_config": {"use_swa": True}}, "True"),
            ({"is_causal": True}, "is_causal True and full layers"),
            (
                {"layer_types": ["sliding_attention"] * 2, "is_causal": False},
                "is_causal False and sliding layers",
            ),
        ],
    )
    def test_what_a_spec_cannot_say_is_refused(self, changes, found):
        assert f"\n  found: {found}" in message(UnsupportedError, qwen3(**changes))

    def test_a_window_needs_a_sliding_layer(self):
        assert message(SpecError, qwen3(), window=2048) == (
            "drafter config: window has no layer to apply to\n"
            "  expected: a 'sliding_attention' layer in layer_types\n"
            "  found: window = 2048 and full layers\n"
            "  what to do: mend layer_types, or write a TOML spec file with [specs.NAME] tables"
        )

    def test_a_family_refuses_parameters_of_another(self):
        assert message(SpecError, qwen3(), family="causal", block_size=16) == (
            "drafter config: mask family 'causal' takes no block_size\n"
            "  expected: no parameters\n"
            "  found: block_size = 16\n"
            "  what to do: remove it or choose another family"
        )

    def test_an_unknown_family(self):
        assert message(SpecError, qwen3(), family="flash") == (
            "drafter config: the mask family is unknown\n"
            "  expected: dflash or dflash-speculators or eagle3 or eagle3-speculators or peagle or causal or "
            "sliding or chunked or document or padding or prefix or full or and or or or a rule of your own, "
            "module:function\n"
            "  found: 'flash'"
        )

    @pytest.mark.parametrize("value", [0, "16"])
    def test_a_wrong_block_size_argument(self, value):
        text = message(SpecError, qwen3(), block_size=value)
        assert (
            text
            == f"spec field 'mask.block_size' is wrong\n  expected: a positive integer\n  found: {value!r}"
        )

    def test_a_value_that_differs_between_layers(self):
        from transformers import Gemma4TextConfig

        text = message(
            SpecError, Gemma4TextConfig(dtype="bfloat16"), block_size=16, family="dflash", window=64
        )
        assert text.startswith("drafter config: ")

    @pytest.mark.parametrize("source", [7, None, SimpleNamespace()])
    def test_something_else_than_a_config(self, source):
        assert message(SpecError, source) == (
            "drafter config: this is no config\n"
            "  expected: a path, a mapping or a transformers config\n"
            f"  found: {type(source).__name__}"
        )

    @pytest.mark.parametrize("name", ["config.json", "spec.toml", "Qwen/Qwen3-8B"])
    def test_a_missing_file(self, tmp_path, name):
        kind = "spec file" if name.endswith("toml") else "drafter config"
        assert message(SpecError, tmp_path / name) == (
            f"{kind} '{tmp_path / name}' does not exist\n"
            "  expected: a config.json, a folder with one, or a TOML spec file\n"
            "  what to do: give a local path; nothing is downloaded here"
        )

    def test_a_folder_without_a_config(self, tmp_path):
        assert f"drafter config '{tmp_path}/config.json' does not exist" in message(SpecError, tmp_path)

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (
                b'{"a": ',
                (
                    "is not JSON\n  "
                    "expected: a HF config.json\n  "
                    "found: Expecting value: line 1 column 7 (char 6)"
                ),
            ),
            (b"[1]", "is wrong\n  expected: a JSON object\n  found: list"),
            (
                b"\xff\xfe",
                (
                    "cannot be read\n  "
                    "expected: UTF-8 text\n  "
                    "found: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"
                ),
            ),
        ],
        ids=["truncated", "list", "binary"],
    )
    def test_a_malformed_file(self, tmp_path, content, text):
        path = tmp_path / "config.json"
        path.write_bytes(content)
        assert message(SpecError, path) == f"drafter config '{path}' {text}"


STANDALONE = """
[specs.draft]
heads = 8
kv_heads = 2
head_dim = 64
dtype = "float32"
[specs.draft.mask]
family = "dflash"
block_size = 4
[specs.target]
heads = 8
kv_heads = 8
head_dim = 64
value_dim = 32
scale = 0.25
dtype = "float32"
[specs.target.mask]
family = "causal"
"""


class TestSpecFile:
    @pytest.fixture
    def path(self, tmp_path):
        config = qwen3(layer_types=["sliding_attention", "full_attention"], sliding_window=2048)
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path / "spec.toml"

    def test_standalone_tables_give_their_names(self, path):
        path.write_text(STANDALONE)
        draft = MaskSpec(family="dflash", block_size=4)
        assert specs_from_config(path) == {
            "draft": attention(8, 2, 64, draft, dtype="float32"),
            "target": attention(
                8, 8, 64, MaskSpec(family="causal"), dtype="float32", value_dim=32, scale=0.25
            ),
        }

    def test_tables_win_over_the_config_and_arguments_over_the_tables(self, path):
        path.write_text(
            'config = "config.json"\n[mask]\nfamily = "dflash-speculators"\nwindow = 64\ncausal = false\n'
            '[attention]\ndtype = "float32"\nkv_heads = 4\n'
        )
        specs = specs_from_config(path, dtype="float16", block_size=4)
        sliding = MaskSpec(family="dflash-speculators", block_size=4, window=64, causal=False)
        full = MaskSpec(family="dflash-speculators", block_size=4)
        assert specs == {
            "sliding": attention(32, 4, 128, sliding, dtype="float16"),
            "full": attention(32, 4, 128, full, dtype="float16"),
        }

    def test_a_mask_and_a_score_may_be_a_name_alone(self, path):
        path.write_text('config = "config.json"\nmask = "dflash-speculators"\nscore = "alibi"\n')
        specs = specs_from_config(path, block_size=4)
        assert {spec.mask.family for spec in specs.values()} == {"dflash-speculators"}
        assert {spec.score for spec in specs.values()} == {ScoreSpec(family="alibi")}

    def test_a_score_has_parameters_of_its_own(self, path):
        config = qwen3(attn_logit_softcapping=30.0)
        (path.parent / "config.json").write_text(json.dumps(config))
        assert "'attn_logit_softcapping' is not supported" in message(UnsupportedError, path.parent)
        path.write_text('config = "config.json"\n[score]\nfamily = "softcap"\ncap = 30.0\n')
        assert only(specs_from_config(path)).score == ScoreSpec(family="softcap", cap=30.0)

    def test_families_of_plain_sequences_and_joined_ones(self, path):
        common = "heads = 8\nkv_heads = 2\nhead_dim = 64\ndtype = 'float32'\n"
        path.write_text(
            f"[specs.a]\n{common}[specs.a.mask]\nfamily = 'sliding'\nwindow = 1024\n"
            f"[specs.b]\nmask = 'document'\n{common}"
            f"[specs.c]\n{common}[specs.c.mask]\nfamily = 'and'\n"
            "parts = [{ family = 'document' }, { family = 'sliding', window = 64 }]\n"
        )
        masks = {name: spec.mask for name, spec in specs_from_config(path).items()}
        parts = (MaskSpec(family="document"), MaskSpec(family="sliding", window=64))
        assert masks == {
            "a": MaskSpec(family="sliding", window=1024),
            "b": MaskSpec(family="document"),
            "c": MaskSpec(family="and", parts=parts),
        }
        (path.parent / "config.json").write_text(json.dumps(qwen3()))
        joined = "[mask]\nfamily = 'or'\nparts = [{ family = 'causal' }, { family = 'prefix' }]\n"
        path.write_text(f"config = 'config.json'\n{joined}")
        assert list(specs_from_config(path)) == ["or"]

    def test_the_config_may_be_a_folder(self, path):
        path.write_text('config = "."\n')
        assert list(specs_from_config(path)) == ["sliding", "full"]

    @pytest.mark.parametrize(
        ("content", "text"),
        [
            (
                'config = "config.json"\ndtype = "float32"',
                (
                    ": unknown key 'dtype'\n  "
                    "expected: one of config, mask, score, attention, specs\n  "
                    "found: dtype\n  "
                    "what to do: remove or rename it"
                ),
            ),
            (
                'config = "config.json"\n[mask]\nblocks = 16',
                (
                    ": unknown key 'mask.blocks'\n  "
                    "expected: one of family, block_size, window, causal, parts, inputs, source, graph\n  "
                    "found: blocks\n  "
                    "what to do: remove or rename it"
                ),
            ),
            (
                'config = "config.json"\n[attention]\nhead = 16',
                (
                    ": unknown key 'attention.head'\n  "
                    "expected: one of heads, kv_heads, head_dim, value_dim, dtype, scale, matmul_precision, "
                    "deterministic\n  "
                    "found: head\n  "
                    "what to do: remove or rename it"
                ),
            ),
            (
                'config = "config.json"\nmask = 7',
                ": 'mask' is wrong\n  expected: a table [mask]\n  found: 7",
            ),
            (
                'config = "config.json"\n[score]\nclamp = 7',
                (
                    ": unknown key 'score.clamp'\n  "
                    "expected: one of family, cap, distance, frozen, parts, inputs, source, graph\n  "
                    "found: clamp\n  "
                    "what to do: remove or rename it"
                ),
            ),
            (
                "config = 7",
                ": 'config' is wrong\n  expected: the path of a config.json or its folder\n  found: 7",
            ),
            (
                'config = "spec.toml"',
                (
                    ": 'config' is wrong\n  "
                    "expected: the path of a config.json or its folder\n  "
                    "found: 'spec.toml'"
                ),
            ),
            (
                "",
                (
                    ": it says neither or both of 'config' and 'specs'\n  "
                    'expected: config = "config.json", or tables [specs.NAME]\n  '
                    "found: an empty file"
                ),
            ),
            (
                STANDALONE + "[mask]\n",
                (
                    ": [mask] belongs to a 'config'\n  "
                    "expected: [specs.NAME] and [specs.NAME.mask] only\n  "
                    "found: [mask]\n  "
                    "what to do: move its keys into each spec"
                ),
            ),
            ("specs = 1", ": 'specs' is wrong\n  expected: tables [specs.NAME]\n  found: 1"),
            ("[specs]\nfull = 1", ": [specs.full] is wrong\n  expected: a table\n  found: 1"),
            (
                STANDALONE.replace("heads = 8\nkv", "head = 8\nkv", 1),
                (
                    ": [specs.draft]: spec field 'head' is wrong\n  "
                    "expected: one of heads, kv_heads, head_dim, value_dim, dtype, scale, mask, score, "
                    "matmul_precision, deterministic\n  "
                    "found: 'head'\n  "
                    "what to do: remove or rename it"
                ),
            ),
            (
                "[specs.a]\nheads = 1\nkv_heads = 1\nhead_dim = 8\ndtype = 'float32'",
                (
                    ": [specs.a]: spec field 'mask' is wrong\n  "
                    "expected: a table with the mask's family\n  "
                    "found: None"
                ),
            ),
            (
                "config = ",
                " is not TOML\n  expected: a TOML spec file\n  found: Invalid value (at end of document)",
            ),
        ],
    )
    def test_a_wrong_key_is_named(self, path, content, text):
        path.write_text(content)
        assert message(SpecError, path) == f"spec file '{path}'{text}"


class TestLiveModule:
    @pytest.fixture
    def model(self):
        import torch
        from transformers import Qwen3Config, Qwen3Model

        config = Qwen3Config.from_dict(
            qwen3(
                hidden_size=64,
                intermediate_size=64,
                head_dim=32,
                num_attention_heads=4,
                num_key_value_heads=2,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=32,
                use_sliding_window=True,
            )
        )
        return Qwen3Model(config).to(torch.bfloat16)

    def test_a_real_model(self, model):
        expected = {
            "sliding": attention(4, 2, 32, MaskSpec(family="dflash", block_size=16, window=32)),
            "full": attention(4, 2, 32),
        }
        assert specs_from_module(model) == expected
        assert specs_from_module(SimpleNamespace(module=model)) == expected

    def test_an_eagle3_layer_of_a_real_model(self):
        from transformers import LlamaConfig, LlamaModel

        config = LlamaConfig(
            architectures=["LlamaForCausalLMEagle3"], vocab_size=64, hidden_size=64, intermediate_size=64,
            head_dim=32, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1,
        )  # fmt: skip
        expected = attention(4, 2, 32, MaskSpec(family="eagle3"), dtype="float32")
        assert specs_from_module(LlamaModel(config)) == {"eagle3": expected}

    def test_builder_and_trainer_agree(self, model):
        written = json.loads(model.config.to_json_string())
        assert specs_from_config(written) == specs_from_module(model)

    def test_the_parameters_dtype_wins_over_the_configs(self, model):
        assert {s.dtype for s in specs_from_module(model.float()).values()} == {"float32"}
        assert {s.dtype for s in specs_from_module(model.float(), dtype="bfloat16").values()} == {"bfloat16"}

    def test_block_size_may_be_an_attribute(self, model):
        del model.config.block_size
        model.block_size = 8
        assert {s.mask.block_size for s in specs_from_module(model).values()} == {8}

    def test_mla_layers_of_a_real_model(self):
        from transformers import DeepseekV3Config, DeepseekV3Model

        config = DeepseekV3Config(
            vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=32, qk_rope_head_dim=16,
            v_head_dim=32, dtype="float32", block_size=4, max_position_embeddings=160,
            rope_parameters={
                "rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.707, "rope_theta": 1e4,
                "original_max_position_embeddings": 4,
            },
        )  # fmt: skip
        model = DeepseekV3Model(config)
        spec = only(specs_from_module(model))
        assert (spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim) == (2, 2, 48, 32)
        assert spec.scale == pytest.approx(model.layers[0].self_attn.scaling)

    @pytest.mark.parametrize(
        ("field", "change", "expected", "found"),
        [
            ("head_dim", lambda a: setattr(a, "head_dim", 16), 32, 16),
            ("heads * head_dim", lambda a: setattr(a.q_proj, "out_features", 64), 128, 64),
            ("kv_heads * head_dim", lambda a: setattr(a.k_proj, "out_features", 128), 64, 128),
            ("kv_heads * value_dim", lambda a: setattr(a.v_proj, "out_features", 128), 64, 128),
            ("scale", lambda a: setattr(a, "scaling", 0.5), 32**-0.5, 0.5),
            ("window", lambda a: setattr(a, "sliding_window", 64), 32, 64),
        ],
    )
    def test_a_layer_that_contradicts_the_config(self, model, field, change, expected, found):
        change(model.layers[0].self_attn)
        with pytest.raises(SpecError) as caught:
            specs_from_module(model)
        assert str(caught.value) == (
            f"config of Qwen3Model: '{field}' is not what layers.0.self_attn has\n"
            f"  expected: {field} = {expected}\n"
            f"  found: {field} = {found}\n"
            "  what to do: mend the config, or build the module from it"
        )

    def test_a_config_changed_after_the_module_was_built(self, model):
        model.config.num_key_value_heads = 4
        with pytest.raises(SpecError, match=r"'kv_heads \* head_dim' is not what layers.0.self_attn has"):
            specs_from_module(model)

    def test_layers_of_different_dtypes(self, model):
        model.layers[1].float()
        with pytest.raises(SpecError) as caught:
            specs_from_module(model)
        assert str(caught.value) == (
            "config of Qwen3Model: 'dtype' is not what layers.1.self_attn has\n"
            "  expected: dtype = bfloat16 as in layers.0.self_attn\n"
            "  found: dtype = float32\n"
            "  what to do: mend the config, or build the module from it"
        )

    def test_two_block_sizes(self, model):
        model.block_size = 8
        with pytest.raises(SpecError) as caught:
            specs_from_module(model)
        assert str(caught.value) == (
            "config of Qwen3Model: 'block_size' is not what Qwen3Model has\n"
            "  expected: block_size = 16\n"
            "  found: block_size = 8\n"
            "  what to do: mend the config, or build the module from it"
        )

    def test_something_else_than_a_drafter(self):
        import torch

        with pytest.raises(SpecError) as caught:
            specs_from_module(torch.nn.Linear(2, 2))
        assert str(caught.value) == (
            "Linear is no drafter\n"
            "  expected: a torch module with a transformers 'config'\n"
            "  found: Linear without one\n"
            "  what to do: give the drafter itself, or use specs_from_config"
        )
