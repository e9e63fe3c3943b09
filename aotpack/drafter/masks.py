"""From an opened config to the masks of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from aotpack.drafter.config import DrafterConfig
from aotpack.errors import SpecError, UnsupportedError
from aotpack.spec import MaskSpec

__all__ = ["FAMILY_PARAMETERS", "dflash_section", "read_block_size", "read_masks", "read_window"]

# The parameters of aotpack.masks' families, which reading a config may not import: they need torch.
FAMILY_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "dflash": ("block_size", "window"),
    "dflash-speculators": ("block_size", "window", "causal"),
    "eagle3": (),
    "eagle3-speculators": ("window",),
    "peagle": (),
    "causal": (),
    "sliding": ("window",),
    "chunked": ("window",),
    "document": (),
    "padding": (),
    "prefix": (),
    "full": (),
}
_JOINED: Final = ("and", "or")
_OWN_PARAMETERS: Final = ("block_size", "inputs", "source")
_LAYER_NAMES: Final = {"full_attention": "full", "sliding_attention": "sliding"}
_SPECULATORS: Final = {
    "dflash": "dflash-speculators",
    "dspark": "dflash-speculators",
    "eagle3": "eagle3-speculators",
    "peagle": "peagle",
}
# Words of the class's name, the first that fits; those that are no family of ours are refused by that name.
_ARCHITECTURES: Final = {
    "peagle": "peagle",
    "eagle3": "eagle3",
    "eagle": "eagle",
    "medusa": "medusa",
    "mtp": "mtp",
}
_SPEC_FILE: Final = (
    'write a TOML spec file: config = "config.json" and [mask] family = "dflash", block_size = 16'
)


def read_masks(config: DrafterConfig, given: Mapping[str, Any]) -> dict[str, MaskSpec]:
    """The masks of a config's layers by name, in the order in which layers first use them.

    Args:
        config: of the drafter.
        given: fields of ``MaskSpec`` that win over it.

    Raises:
        SpecError: a field is missing or wrong, or this is no drafter.
        UnsupportedError: a drafter that aotpack cannot express.
    """
    family = given["family"] if "family" in given else _family(config)
    if not isinstance(family, str) or not (":" in family or family in (*_JOINED, *FAMILY_PARAMETERS)):
        raise SpecError(
            f"{config.origin}: the mask family is unknown",
            expected=" or ".join([*FAMILY_PARAMETERS, *_JOINED, "a rule of your own, module:function"]),
            found=repr(family),
        )
    _check_parameters(config, family, given)
    if family not in FAMILY_PARAMETERS:
        return {family.rpartition(":")[2]: MaskSpec(**given)}
    if family == "sliding":
        return {family: MaskSpec(family=family, window=given.get("window") or read_window(config))}
    if family == "chunked":
        window = given.get("window") or config.of_layers("attention_chunk_size")
        return {family: MaskSpec(family=family, window=window)}
    return _by_layer(config, family, given)


def read_block_size(config: DrafterConfig) -> int | None:
    """The block size, at the top, in ``dflash_config`` or in the layers' section; None where none says it."""
    places = (
        config.of_drafter("block_size"),
        dflash_section(config).get("block_size"),
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


def dflash_section(config: DrafterConfig) -> Mapping[str, Any]:
    """The config's ``dflash_config``, empty where there is none."""
    value = config.get("dflash_config")
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise config.wrong("dflash_config", "an object", value)
    return value


def _check_parameters(config: DrafterConfig, family: str, given: Mapping[str, Any]) -> None:
    others = ("parts",) if family in _JOINED else _OWN_PARAMETERS
    parameters = FAMILY_PARAMETERS.get(family, others)
    if extra := [name for name in given if name not in ("family", *parameters)]:
        raise SpecError(
            f"{config.origin}: mask family '{family}' takes no {extra[0]}",
            expected=", ".join(parameters) or "no parameters",
            found=f"{extra[0]} = {given[extra[0]]!r}",
            remedy="remove it or choose another family",
        )


def _by_layer(config: DrafterConfig, family: str, given: Mapping[str, Any]) -> dict[str, MaskSpec]:
    layers, parameters = _layers(config), FAMILY_PARAMETERS[family]
    if "window" not in parameters:
        _refuse_sliding(config, family, layers)
        return {family: MaskSpec(family=family)}
    _refuse_unused(config, layers, given)
    if "block_size" not in parameters:
        return {
            "sliding" if layer == "sliding" else "eagle3": MaskSpec(
                family=family, window=_window(config, given) if layer == "sliding" else None
            )
            for layer in layers
        }
    if "family" not in given:
        _refuse_causality(config, layers)
    return {layer: _dflash_mask(config, family, layer, given) for layer in layers}


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
    return MaskSpec(family=family, block_size=block_size, window=_window(config, given), causal=causal)


def _window(config: DrafterConfig, given: Mapping[str, Any]) -> Any:
    return given["window"] if "window" in given else read_window(config)


def _family(config: DrafterConfig) -> str:
    kind = config.of_drafter("speculators_model_type")
    if kind is not None:
        family = _SPECULATORS.get(str(kind).replace("-", ""))
        if family is None:
            raise _unknown_family(config, kind)
        return family
    names = config.of_drafter("architectures") or []
    words = " ".join(names).lower() if isinstance(names, list | tuple) and all(map(_is_str, names)) else ""
    named = next((family for word, family in _ARCHITECTURES.items() if word in words), None)
    if named is not None:
        if named in FAMILY_PARAMETERS:
            return named
        raise _unknown_family(config, named)
    if read_block_size(config) is not None or "dflash" in words or "dspark" in words:
        return "dflash"
    if config.get("draft_vocab_size") is not None:
        return "eagle3"
    raise SpecError(
        f"{config.origin}: this is not a drafter",
        expected="'block_size', at the top or in 'dflash_config', or 'speculators_model_type'",
        found=f"model_type {config.of_drafter('model_type')!r} with architectures {list(names)!r}",
        remedy=f"give the drafter's config, not the target's, or {_SPEC_FILE}",
    )


def _is_str(value: object) -> bool:
    return isinstance(value, str)


def _unknown_family(config: DrafterConfig, name: object) -> UnsupportedError:
    return UnsupportedError(
        f"{config.origin}: drafters of the family '{name}' are not supported",
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


def _refuse_unused(config: DrafterConfig, layers: tuple[str, ...], given: Mapping[str, Any]) -> None:
    for name in ("window", "causal"):
        if name in given and "sliding" not in layers:
            raise SpecError(
                f"{config.origin}: {name} has no layer to apply to",
                expected="a 'sliding_attention' layer in layer_types",
                found=f"{name} = {given[name]!r} and {', '.join(layers)} layers",
                remedy="mend layer_types, or write a TOML spec file with [specs.NAME] tables",
            )


def _refuse_causality(config: DrafterConfig, layers: tuple[str, ...]) -> None:
    """DFlash blocks see themselves whole in full layers and up to their own offset in sliding ones."""
    section = dflash_section(config)
    flags = (config.of_drafter("is_causal"), section.get("is_causal"), section.get("causal"))
    flag = next((value for value in flags if value is not None), None)
    if (flag is True and "full" in layers) or (flag is False and "sliding" in layers):
        raise UnsupportedError(
            f"{config.origin}: blocks of this causality are not supported",
            expected="full layers that are not causal in a block, sliding ones that are",
            found=f"is_causal {flag} and {', '.join(layers)} layers",
            remedy="if its trainer ignores the flag, say the mask family in a TOML spec file",
        )
