"""Tiny models of transformers with one attention's sizes, so that one package serves them all."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

from aotpack.integrations import transformers as hf
from aotpack.spec import AttentionSpec, ScoreSpec

WINDOW, CHUNK, BATCH, LENGTH = 24, 40, 2, 150
LAYERS = ["sliding_attention", "full_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def qwen3(**fields: Any) -> Any:
    return transformers.Qwen3Config(**{**SIZES, **fields})


def gemma3(**fields: Any) -> Any:
    return transformers.Gemma3TextConfig(
        **{**SIZES, "layer_types": LAYERS, "sliding_window": WINDOW, "query_pre_attn_scalar": 32, **fields}
    )


def gemma2(**fields: Any) -> Any:
    """With soft-capped scores; full layers alone, to build one spec less."""
    return transformers.Gemma2Config(
        **{**SIZES, "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 32, **fields}
    )


def gpt_oss(**fields: Any) -> Any:
    """With attention sinks."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.GptOssConfig(
        **{**SIZES, **experts, "layer_types": LAYERS, "sliding_window": WINDOW, **fields}
    )


def qwen35(**fields: Any) -> Any:
    """The text model of Qwen3.5: layers of linear attention beside full ones."""
    linear = {f"linear_num_{name}_heads": 2 for name in ("key", "value")}
    linear |= {f"linear_{name}_head_dim": 16 for name in ("key", "value")}
    layers = ["linear_attention", "full_attention"]
    return transformers.Qwen3_5TextConfig(**{**SIZES, **linear, "layer_types": layers, **fields})


def llama4(**fields: Any) -> Any:
    """With chunked layers."""
    experts = {"num_local_experts": 2, "intermediate_size_mlp": 64}
    layers = ["chunked_attention", "full_attention"]
    return transformers.Llama4TextConfig(
        **{**SIZES, **experts, "layer_types": layers, "attention_chunk_size": CHUNK, **fields}
    )


def package_specs(*, every: bool) -> dict[str, AttentionSpec]:
    """The specs of gemma3, which qwen3's and qwen3.5's are of, and of gpt-oss, or of every model; each once.

    Left out is what no test has: plain batches in sliding layers and with sinks.
    """
    found: dict[AttentionSpec, str] = {}
    for config in (gemma3(), gpt_oss()):
        for name, spec in hf.specs(config, padded=True, packed=True).items():
            if name != "sliding" and (name, spec.score) != ("causal", ScoreSpec(family="sinks")):
                found.setdefault(spec, f"{config.model_type}.{name}")
    for config in (gemma2(), llama4()) if every else ():
        for name, spec in hf.specs(config).items():
            found.setdefault(spec, f"{config.model_type}.{name}")
    return {name: spec for spec, name in found.items()}


def made(config: Any, attention: str, seed: int = 0) -> Any:
    """A model with the weights of a seed, in training mode."""
    torch.manual_seed(seed)
    # A model keeps the config that it is given, and the attention's name in it.
    config = copy.deepcopy(config)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(weight)
    return model.train()


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(3, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def plain(seed: int = 0) -> dict[str, Tensor]:
    return {"input_ids": tokens(seed), "labels": tokens(seed)}


def right_padded(seed: int = 0) -> dict[str, Tensor]:
    """As a tokenizer pads: the second entry ends early."""
    real = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    real[1, LENGTH - 37 :] = 0
    ids = tokens(seed) * real
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}


def packed(seed: int = 0) -> dict[str, Tensor]:
    """Documents one after the other, as position_ids say."""
    positions = torch.stack(
        [
            torch.cat([torch.arange(n) for n in lengths])
            for lengths in ((50, LENGTH - 50), (9, 71, LENGTH - 80))
        ]
    )
    labels = tokens(seed).masked_fill(positions == 0, -100)
    return {"input_ids": tokens(seed), "position_ids": positions, "labels": labels}
