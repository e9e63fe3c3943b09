"""From an opened config to specs: which mask, which sizes, which scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Final

from aotpack.drafter.config import DrafterConfig
from aotpack.drafter.overrides import Overrides
from aotpack.errors import SpecError, UnsupportedError
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["FAMILY_PARAMETERS", "read_block_size", "read_specs", "read_window"]

FAMILY_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "dflash": ("block_size", "window"),
    "dflash-speculators": ("block_size", "window", "causal"),
    "causal": (),
    "full": (),
}
_LAYER_NAMES: Final = {"full_attention": "full", "sliding_attention": "sliding"}
_SPECULATORS_DFLASH: Final = ("dflash", "dspark")
_FOREIGN: Final = {"peagle": "peagle", "eagle": "eagle3", "medusa": "medusa", "mtp": "mtp"}
_SPEC_FILE: Final = (
    'write a TOML spec file: config = "config.json" and [mask] family = "dflash", block_size = 16'
)


def read_specs(config: DrafterConfig, overrides: Overrides) -> dict[str, AttentionSpec]:
    """The specs of a config by the name of the layer mask, in the order in which layers first use them.

    Raises:
        SpecError: a field is missing or wrong, or this is no drafter.
        UnsupportedError: a drafter that aotpack cannot express.
    """
    masks = _masks(config, overrides.mask)
    _refuse_score_modifications(config)
    attention = {**_attention(config, overrides.attention), **overrides.attention}
    try:
        return {name: AttentionSpec(**attention, mask=mask) for name, mask in masks.items()}
    except SpecError as error:
        raise SpecError(
            f"{config.origin}: {error.problem}",
            expected=error.expected,
            found=error.found,
            remedy=error.remedy,
        ) from error


def read_block_size(config: DrafterConfig) -> int | None:
    """The block size, at the top, in ``dflash_config`` or in the layers' section; None where none says it."""
    places = (
        config.of_drafter("block_size"),
        _dflash(config).get("block_size"),
        config.of_layers("block_size"),
    )
    value = next((v for v in places if v is not None), None)
    if value is not None and (type(value) is not int or value < 1):
        raise config.wrong("block_size", "a positive integer", value)
    return value


def read_window(config: DrafterConfig) -> int:
    """The window of sliding layers: ``use_sliding_window`` is not asked, ``layer_types`` decides."""
    value = config.of_layers("sliding_window")
    if type(value) is not int or value < 1:
        raise config.wrong("sliding_window", "the window of the sliding layers in tokens", value)
    return value


def _dflash(config: DrafterConfig) -> Mapping[str, Any]:
    value = config.get("dflash_config")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise config.wrong("dflash_config", "an object", value)
    return value


def _masks(config: DrafterConfig, given: Mapping[str, Any]) -> dict[str, MaskSpec]:
    family = given["family"] if "family" in given else _family(config)
    if family not in FAMILY_PARAMETERS:
        raise SpecError(
            f"{config.origin}: the mask family is unknown",
            expected=" or ".join(FAMILY_PARAMETERS),
            found=repr(family),
        )
    parameters = FAMILY_PARAMETERS[family]
    if extra := [name for name in given if name not in ("family", *parameters)]:
        raise SpecError(
            f"{config.origin}: mask family '{family}' takes no {extra[0]}",
            expected=", ".join(parameters) or "no parameters",
            found=f"{extra[0]} = {given[extra[0]]!r}",
            remedy="remove it or choose another family",
        )
    layers = _layers(config)
    if not parameters:
        _refuse_sliding(config, family, layers)
        return {family: MaskSpec(family=family)}
    if "family" not in given:
        _refuse_causality(config, layers)
    for name in ("window", "causal"):
        if name in given and "sliding" not in layers:
            raise SpecError(
                f"{config.origin}: {name} has no layer to apply to",
                expected="a 'sliding_attention' layer in layer_types",
                found=f"{name} = {given[name]!r} and {', '.join(layers)} layers",
                remedy="mend layer_types, or write a TOML spec file with [specs.NAME] tables",
            )
    return {name: _dflash_mask(config, family, name, given) for name in layers}


def _dflash_mask(config: DrafterConfig, family: str, layer: str, given: Mapping[str, Any]) -> MaskSpec:
    block_size = given["block_size"] if "block_size" in given else read_block_size(config)
    if block_size is None:
        raise SpecError(
            f"{config.origin}: a {family} drafter without a block size",
            expected="'block_size', at the top or in 'dflash_config'",
            found="neither",
            remedy=f"add it, or {_SPEC_FILE}",
        )
    if layer == "full":
        return MaskSpec(family=family, block_size=block_size)
    causal = given.get("causal")
    if family == "dflash-speculators" and causal is None:
        causal = not config.of_drafter("sliding_window_non_causal")
    window = given["window"] if "window" in given else read_window(config)
    return MaskSpec(family=family, block_size=block_size, window=window, causal=causal)


def _family(config: DrafterConfig) -> str:
    kind = config.of_drafter("speculators_model_type")
    if kind is not None:
        if kind in _SPECULATORS_DFLASH:
            return "dflash-speculators"
        raise _unknown_family(config, kind)
    names = config.of_drafter("architectures") or []
    words = " ".join(names).lower() if isinstance(names, list | tuple) and all(map(_is_str, names)) else ""
    foreign = next((family for word, family in _FOREIGN.items() if word in words), None)
    if foreign is not None:
        raise _unknown_family(config, foreign)
    if read_block_size(config) is not None or "dflash" in words or "dspark" in words:
        return "dflash"
    if config.get("draft_vocab_size") is not None:
        raise _unknown_family(config, "eagle3")
    raise SpecError(
        f"{config.origin}: this is not a drafter",
        expected="'block_size', at the top or in 'dflash_config', or 'speculators_model_type'",
        found=f"model_type {config.of_drafter('model_type')!r} with architectures {list(names)!r}",
        remedy=f"give the drafter's config, not the target's, or {_SPEC_FILE}",
    )


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _unknown_family(config: DrafterConfig, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{config.origin}: drafters of the family '{name}' are not supported yet",
        expected=" or ".join(FAMILY_PARAMETERS),
        found=name,
        remedy="say another mask family in a TOML spec file",
    )


def _layers(config: DrafterConfig) -> tuple[str, ...]:
    """Names of the layers' masks, each once, in the order of their first layer."""
    types = config.of_layers("layer_types") or ["full_attention"]
    if not isinstance(types, list | tuple):
        raise config.wrong("layer_types", "a list", types)
    for kind in types:
        if kind not in _LAYER_NAMES:
            raise UnsupportedError(
                f"{config.origin}: layers of the type {kind!r} are not supported",
                expected=" or ".join(_LAYER_NAMES),
                found=kind,
                remedy="write a TOML spec file with a [specs.NAME] table for each layer mask",
            )
    return tuple(dict.fromkeys(_LAYER_NAMES[kind] for kind in types))


def _refuse_sliding(config: DrafterConfig, family: str, layers: tuple[str, ...]) -> None:
    if "sliding" in layers:
        raise UnsupportedError(
            f"{config.origin}: mask family '{family}' has no window",
            expected="full_attention layers",
            found="a sliding_attention layer",
            remedy="choose a family with a window",
        )


def _refuse_causality(config: DrafterConfig, layers: tuple[str, ...]) -> None:
    """DFlash blocks see themselves whole in full layers and up to their own offset in sliding ones."""
    flags = (config.of_drafter("is_causal"), _dflash(config).get("is_causal"), _dflash(config).get("causal"))
    flag = next((value for value in flags if value is not None), None)
    if (flag is True and "full" in layers) or (flag is False and "sliding" in layers):
        raise UnsupportedError(
            f"{config.origin}: blocks of this causality are not supported",
            expected="full layers that are not causal in a block, sliding ones that are",
            found=f"is_causal {flag} and {', '.join(layers)} layers",
            remedy="if its trainer ignores the flag, say the mask family in a TOML spec file",
        )


def _refuse_score_modifications(config: DrafterConfig) -> None:
    for name, value in (
        ("attn_logit_softcapping", config.get("attn_logit_softcapping")),
        ("attention_sink_bias", _dflash(config).get("attention_sink_bias")),
        ("use_swa", _dflash(config).get("use_swa")),
    ):
        if value is not None and value is not False:
            raise UnsupportedError(
                f"{config.origin}: '{name}' is not supported", expected="no such key", found=f"{value!r}"
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
