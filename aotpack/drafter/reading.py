"""From an opened config to specs: which mask, which sizes, which scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from aotpack.drafter.config import DrafterConfig
from aotpack.drafter.masks import dflash_section, read_block_size, read_masks
from aotpack.drafter.overrides import Overrides
from aotpack.errors import SpecError, UnsupportedError
from aotpack.own import resolve
from aotpack.spec import AttentionSpec

__all__ = ["read_specs"]


def read_specs(config: DrafterConfig, overrides: Overrides) -> dict[str, AttentionSpec]:
    """The specs of a config by the name of the layer mask, in the order in which layers first use them.

    Raises:
        SpecError: a field is missing or wrong, or this is no drafter; or a rule of the user's own cannot be
            used.
        UnsupportedError: a drafter that aotpack cannot express.
    """
    masks = read_masks(config, overrides.mask)
    if "score" not in overrides.attention:
        _refuse_score_modifications(config)
    attention = {**_attention(config, overrides.attention), **overrides.attention}
    own = any(leaf.own for mask in masks.values() for leaf in mask.leaves())
    block_size = read_block_size(config) if own else None
    try:
        return {
            name: resolve(AttentionSpec(**attention, mask=mask), block_size=block_size)
            for name, mask in masks.items()
        }
    except SpecError as error:
        raise SpecError(
            f"{config.origin}: {error.problem}",
            expected=error.expected,
            found=error.found,
            remedy=error.remedy,
        ) from error


def _refuse_score_modifications(config: DrafterConfig) -> None:
    for name, value in (
        ("attn_logit_softcapping", config.get("attn_logit_softcapping")),
        ("attention_sink_bias", dflash_section(config).get("attention_sink_bias")),
        ("use_swa", dflash_section(config).get("use_swa")),
    ):
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{config.origin}: '{name}' is not supported",
                expected="no such key",
                found=f"{value!r}",
                remedy="say what it does to the scores as the 'score' of a TOML spec file",
            )


def _attention(config: DrafterConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``AttentionSpec`` that are not given, from the config."""
    found: dict[str, Any] = {"dtype": _dtype(config, given)}
    found["heads"] = heads = given.get("heads") or config.size("num_attention_heads")
    if config.get("kv_lora_rank") is not None and config.get("qk_nope_head_dim") is not None:
        found["kv_heads"] = heads
        found["head_dim"] = config.size("qk_nope_head_dim") + config.size("qk_rope_head_dim")
        found["value_dim"] = config.size("v_head_dim")
        found["scale"] = found["head_dim"] ** -0.5 * _yarn_scale(config)
        return found
    if "kv_heads" not in given:
        found["kv_heads"] = _kv_heads(config, heads)
    if "head_dim" not in given:
        found["head_dim"] = _head_dim(config, heads)
    if (scale := _scale(config)) is not None:
        found["scale"] = scale
    return found


def _scale(config: DrafterConfig) -> float | None:
    """A scale of the config's own; None where it is ``head_dim ** -0.5``."""
    for name, power in (("query_pre_attn_scalar", -0.5), ("attention_multiplier", 1.0)):
        value = config.get(name)
        if value is None:
            continue
        if not isinstance(value, int | float) or not value > 0:
            raise config.wrong(name, "a positive number", value)
        return float(value**power)
    return None


def _dtype(config: DrafterConfig, given: Mapping[str, Any]) -> str:
    if "dtype" in given:
        return str(given["dtype"])
    places = (config.of_drafter("dtype"), config.of_drafter("torch_dtype"), config.get("dtype"))
    value = next((v for v in places if v is not None), None)
    if value is None:
        raise config.wrong("dtype", "float32 or bfloat16 or float16", None)
    return str(value).removeprefix("torch.")


def _kv_heads(config: DrafterConfig, heads: int) -> int:
    """Key heads; a missing key means as many as query heads, unless transformers' class says otherwise."""
    value = config.of_layers("num_key_value_heads")
    if value is None:
        return heads
    if not config.says("num_key_value_heads") and value != heads:
        raise config.wrong("num_key_value_heads", "a positive integer", None)
    return int(value)


def _head_dim(config: DrafterConfig, heads: int) -> int:
    """The head size; a missing key means hidden_size / heads, and a key that is there is never computed."""
    value = config.of_layers("head_dim")
    if value is not None and config.says("head_dim"):
        return config.size("head_dim")
    hidden = config.size("hidden_size")
    if hidden % heads:
        raise config.wrong("head_dim", f"a value, as {heads} heads do not divide hidden_size {hidden}", None)
    if value is not None and value != hidden // heads:
        warnings.warn(
            f"{config.origin}: 'head_dim' is missing and read as hidden_size / heads = {hidden // heads}; "
            f"{type(config.text).__name__} would take {value}: add it to the config",
            stacklevel=2,
        )
    return hidden // heads


def _yarn_scale(config: DrafterConfig) -> float:
    """What yarn multiplies the scores of an MLA layer with: (0.1 m ln(factor) + 1)^2 with m = mscale_all_dim.

    Source: DeepSeek-V3's ``modeling_deepseek.py``, ``yarn_get_mscale``.
    """
    rope = config.of_layers("rope_parameters") or config.of_layers("rope_scaling") or {}
    factor, mscale = rope.get("factor") or 1, rope.get("mscale_all_dim") or 0
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return 1.0
    return float(0.1 * mscale * math.log(factor) + 1.0) ** 2
