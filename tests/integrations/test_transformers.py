"""attn_implementation="aotpack" in models of transformers: what it computes, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.modeling_utils import AttentionInterface

import aotpack
from aotpack.errors import HostError, InputError, MismatchError, SpecError, UnsupportedError
from aotpack.integrations import transformers as hf
from aotpack.integrations.hf import structure
from aotpack.spec import MaskSpec, ScoreSpec
from tests.conftest import build_once
from tests.integrations import models
from tests.integrations.training import relative, worst_difference

ROOT = Path(__file__).parents[2]
OTHER = os.environ.get("AOTPACK_TEST_TORCH211", sys.executable)


@pytest.fixture(scope="module")
def package(built):
    """The specs of four tiny models, for the CPU in float32."""
    return build_once(built, "transformers", models.package_specs(every=False))


@pytest.fixture
def every_model(built, package):
    """A pack with every tiny model's specs in the place of the other, for the time of a test."""
    (found,) = hf.register(build_once(built, "transformers-every", models.package_specs(every=True)))
    yield found
    hf.register(package)


@pytest.fixture(scope="module", autouse=True)
def pack(package):
    (found,) = hf.register(package)
    return found


def attentions(pack):
    return {name: sum(stats.forward.values()) for name, stats in pack.stats().attentions.items()}


@pytest.mark.parametrize("batches", [models.right_padded, models.packed])
@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (models.qwen3, "sdpa"),
        (models.gemma3, "sdpa"),
        (models.qwen35, "sdpa"),
        (models.gpt_oss, "eager"),  # sdpa has no sinks
    ],
)
def test_training_is_that_of_another_attention(pack, config, reference, batches):
    before = attentions(pack)
    with aotpack.no_tracing() as watch:
        assert worst_difference(config(), reference, batches) < 2e-5
    assert watch.count == 0
    used = {name for name, calls in attentions(pack).items() if calls > before[name]}
    suffix = "-padded" if batches is models.right_padded else "-packed"
    kinds = ("sliding", "causal") if config in (models.gemma3, models.gpt_oss) else ("causal",)
    owner = "gpt_oss" if config is models.gpt_oss else "gemma3_text"
    assert used == {f"{owner}.{kind}{suffix}" for kind in kinds}


def test_plain_batches():
    assert worst_difference(models.qwen3(), "sdpa", models.plain, steps=2) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize(("config", "reference"), [(models.gemma2, "eager"), (models.llama4, "sdpa")])
def test_plain_batches_soft_capped_scores_and_chunks(every_model, config, reference):
    assert worst_difference(config(), reference, models.plain, steps=2) < 2e-5


def test_gradient_checkpointing_keeps_the_gradients():
    gradients = []
    for checkpointing in (False, True):
        model = models.made(models.gemma3(), "aotpack")
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(**models.right_padded(), use_cache=False).loss.backward()
        gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
    assert relative(*gradients) < 1e-6


def test_compiled_layers_have_no_graph_break():
    losses = []
    for compiled in (False, True):
        model = models.made(models.gemma3(), "aotpack")
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        output = model(**models.right_padded(), use_cache=False)
        output.loss.backward()
        losses.append(output.loss)
    assert relative(*losses) < 1e-6


def test_a_trainer_may_make_the_mask_itself(pack):
    model, other = (models.made(models.qwen3(), name).eval() for name in ("aotpack", "sdpa"))
    mask = pack.attention("gemma3_text.causal").block_mask(query_len=models.LENGTH, context_len=models.LENGTH)
    states = torch.randn(models.BATCH, models.LENGTH, 48)
    angles = model.model.rotary_emb(states, torch.arange(models.LENGTH)[None])
    found, expected = (
        each.model.layers[0].self_attn(states, position_embeddings=angles, attention_mask=given)[0]
        for each, given in ((model, mask), (other, None))
    )
    assert relative(found, expected) < 1e-5


def test_left_padding_and_a_batch_that_turns_out_to_have_none():
    real = torch.ones(models.BATCH, models.LENGTH, dtype=torch.int64)
    padded = real.clone()
    padded[1, :37] = 0
    ids, pair = models.tokens(), [models.made(models.qwen3(), name).eval() for name in ("aotpack", "sdpa")]
    for mask in (real, padded):
        with torch.no_grad():
            mine, other = (model(input_ids=ids, attention_mask=mask).logits for model in pair)
        assert relative(mine[mask == 1], other[mask == 1]) < 1e-5


def test_the_specs_of_a_model_are_those_of_its_config_and_of_its_folder(tmp_path):
    config = models.gpt_oss()
    found = hf.specs(config, padded=True, packed=True)
    sliding, padding = MaskSpec(family="sliding", window=models.WINDOW), MaskSpec(family="padding")
    document = MaskSpec(family="document")
    assert {name: spec.mask for name, spec in found.items()} == {
        "sliding": sliding,
        "sliding-padded": MaskSpec(family="and", parts=(sliding, padding)),
        "sliding-packed": MaskSpec(family="and", parts=(document, sliding)),
        "causal": MaskSpec(family="causal"),
        "causal-padded": MaskSpec(family="and", parts=(MaskSpec(family="causal"), padding)),
        "causal-packed": document,
    }
    assert {spec.score for spec in found.values()} == {ScoreSpec(family="sinks")}
    config.save_pretrained(tmp_path)
    assert hf.specs(tmp_path, padded=True, packed=True) == found
    assert hf.specs(models.made(config, "eager"), padded=True, packed=True) == found
    assert {spec.dtype for spec in hf.specs(config, dtype="bfloat16").values()} == {"bfloat16"}


def test_a_multimodal_config_has_the_specs_of_its_text_model():
    text = models.qwen35()
    whole = transformers.Qwen3_5Config(text_config=text.to_dict())
    assert hf.specs(whole) == hf.specs(text)


def test_something_that_is_no_model(tmp_path):
    with pytest.raises(InputError, match="there is no such model"):
        hf.specs(tmp_path / "missing")
    with pytest.raises(InputError, match="this is no model of transformers"):
        hf.specs(torch.nn.Linear(2, 2).weight)
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(SpecError, match="the config cannot be read"):
        hf.specs(tmp_path)
    with pytest.raises(SpecError, match="cannot be run without values"):
        hf.specs(transformers.SiglipVisionConfig())
    with pytest.raises(SpecError, match="no layer of the model uses attention"):
        hf.specs(transformers.MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=64))


def refused(config, error=UnsupportedError, batch=None, **options):
    with pytest.raises(error) as caught:
        models.made(config, "aotpack")(**(batch or models.plain()), **{"use_cache": False, **options})
    return str(caught.value)


def test_dropout_is_refused_in_training_alone():
    config = models.qwen3(attention_dropout=0.1)
    assert refused(config) == (
        "Qwen3Attention: attention dropout is not supported\n"
        "  expected: attention_dropout = 0 in the config\n"
        "  found: 0.1\n"
        '  what to do: change it, or use attn_implementation="sdpa" for this model'
    )
    models.made(config, "aotpack").eval()(**models.plain())


def test_a_name_without_a_mask_function_is_refused():
    AttentionInterface.register("half", AttentionInterface()["aotpack"])
    with pytest.raises(UnsupportedError, match="Qwen3Attention: a causal layer came without a mask"):
        models.made(models.qwen3(), "half")(**models.plain())


def test_a_dense_mask_is_refused():
    mask = torch.ones(models.BATCH, 1, models.LENGTH, models.LENGTH, dtype=torch.bool).tril()
    message = refused(models.qwen3(), batch={"input_ids": models.tokens(), "attention_mask": mask})
    assert "a mask that was made elsewhere is not supported" in message
    assert "Tensor of shape [2, 1, 150, 150]" in message


def test_gemma4_is_refused_by_name():
    config = transformers.Gemma4TextConfig(
        **{**models.SIZES, "vocab_size_per_layer_input": 64}, layer_types=models.LAYERS
    )
    with pytest.raises(UnsupportedError, match="models of the type gemma4 are not supported"):
        hf.specs(config)


def test_a_vision_tower_is_refused():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=16)
    model = transformers.AutoModel.from_config(config, attn_implementation="aotpack")
    with pytest.raises(UnsupportedError, match="a layer that is not causal came without a mask") as caught:
        model(pixel_values=torch.zeros(1, 3, 32, 32))
    assert '"vision_config": "sdpa"' in str(caught.value)


@pytest.mark.parametrize(
    ("combined", "named"), [("and_mask_function", "every_second"), ("or_mask_function", "or_masks")]
)
def test_a_mask_function_of_the_users_own_is_refused(combined, named):
    def every_second(b, h, q, kv):
        return (q - kv) % 2 == 0

    config = models.qwen3()
    config._attn_implementation = "aotpack"
    with pytest.raises(UnsupportedError, match="is not one that aotpack knows") as caught:
        masking_utils.create_causal_mask(
            config, torch.zeros(1, 8, 48), None, None, **{combined: every_second}
        )
    assert named in str(caught.value)


def test_chunks_of_packed_sequences_are_refused():
    assert "chunks, or positions that are no documents', in packed sequences" in refused(
        models.llama4(), batch=models.packed()
    )


def test_a_package_without_the_spec_says_which_and_how_to_build_it(package):
    message = refused(models.qwen3(num_attention_heads=8), MismatchError, models.right_padded())
    assert message.startswith("the package has not the attention that Qwen3Attention needs\n  expected: {")
    assert '"heads":8,"kv_heads":2,"mask":{"family":"and"' in message
    assert f"found: {package} with " in message
    assert "aotpack build --model CONFIG --padded --dtype float32 --target cpu-" in message
    with pytest.raises(MismatchError, match="heads: expected 8, found 4"):
        hf.register(package, model=models.qwen3(num_attention_heads=8))


def test_autocast_needs_a_spec_of_its_dtype():
    with torch.autocast("cpu", torch.bfloat16):
        assert '"dtype":"bfloat16"' in refused(models.qwen3(), MismatchError)


def test_generation_from_a_cache_is_refused():
    model = models.made(models.qwen3(), "aotpack").eval()
    with pytest.raises(UnsupportedError, match="queries that continue a cache are not supported"):
        model.generate(models.tokens()[:1, :5], max_new_tokens=3, do_sample=False)


def test_tensors_on_a_device_without_a_package_are_refused():
    with torch.device("meta"):
        message = refused(models.qwen3(), InputError, use_cache=True)
    assert "Qwen3Attention runs on a device without a package" in message
    assert "aotpack.load(PACKAGE, device='meta')" in message


def test_one_package_a_device(pack):
    for packs in ((), (pack, pack)):
        with pytest.raises(InputError, match="one package a device is needed"):
            hf.register(*packs)


def test_a_transformers_that_computes_another_window_is_refused(pack, monkeypatch):
    def sliding_window_overlay(sliding_window):
        def inner_mask(batch_idx, head_idx, q_idx, kv_idx):
            return kv_idx >= q_idx - sliding_window

        return inner_mask

    monkeypatch.setattr(masking_utils, "sliding_window_overlay", sliding_window_overlay)
    structure._kinds.cache_clear()
    try:
        with pytest.raises(HostError, match="other cells of the mask sliding"):
            hf.register(pack)
        monkeypatch.delattr(masking_utils, "add_offsets_to_mask_function")
        structure._kinds.cache_clear()
        with pytest.raises(HostError, match="transformers makes masks in another way"):
            hf.register(pack)
    finally:
        monkeypatch.undo()
        structure._kinds.cache_clear()
    structure.check()


def test_the_oldest_transformers_and_torch_train_from_the_same_package(package):
    command = [OTHER, "-m", "tests.integrations.training", str(package)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.splitlines()[-1])
    assert data["worst"] < 2e-5
    assert (data["traces"], data["calls"] > 0) == (0, True)
