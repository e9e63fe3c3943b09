"""Checking specs against a live module's attention layers, without importing torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from aotpack.drafter.config import DrafterConfig
from aotpack.drafter.masks import FAMILY_PARAMETERS, read_block_size
from aotpack.drafter.overrides import Overrides
from aotpack.errors import SpecError
from aotpack.spec import AttentionSpec

__all__ = ["check_module", "module_overrides", "unwrapped"]


def unwrapped(module: Any) -> Any:
    """The drafter inside wrappers such as ``DistributedDataParallel``: the first module with a config.

    Raises:
        SpecError: there is none.
    """
    inner = module
    while inner is not None and getattr(inner, "config", None) is None:
        inner = getattr(inner, "module", None)
    if inner is None or not hasattr(inner, "named_modules"):
        raise SpecError(
            f"{type(module).__name__} is no drafter",
            expected="a torch module with a transformers 'config'",
            found=f"{type(module).__name__} without one",
            remedy="give the drafter itself, or use specs_from_config",
        )
    return inner


def module_overrides(module: Any, config: DrafterConfig, given: Overrides) -> Overrides:
    """What the module knows better than its config: the block size and the dtype of its projections.

    Raises:
        SpecError: the module's block size is not the config's, or projections differ in dtype.
    """
    written, live = read_block_size(config), getattr(module, "block_size", None)
    if live is not None and "block_size" not in given.mask and written not in (None, live):
        raise _drift(config, type(module).__name__, "block_size", written, live)
    dtypes = {name: dtype for name, layer in attention_layers(module) if (dtype := _dtype(layer))}
    if "dtype" not in given.attention and len(set(dtypes.values())) > 1:
        first, last = (
            next(iter(dtypes)),
            next(n for n, d in dtypes.items() if d != next(iter(dtypes.values()))),
        )
        raise _drift(config, last, "dtype", f"{dtypes[first]} as in {first}", dtypes[last])
    known = Overrides.of(block_size=live, dtype=next(iter(dtypes.values()), None))
    family = given.mask.get("family")
    if family is not None and "block_size" not in FAMILY_PARAMETERS.get(family, ()):
        known = Overrides(attention=known.attention)
    return known.under(given)


def check_module(module: Any, config: DrafterConfig, specs: Mapping[str, AttentionSpec]) -> None:
    """Compare every attention layer with its spec, where the layer shows what it is.

    Raises:
        SpecError: naming the layer, the field, and the values of config and layer.
    """
    for name, layer in attention_layers(module):
        spec = _spec_of(layer, config, specs)
        for field, expected, found in _facts(layer, spec):
            same = math.isclose(expected, found, rel_tol=1e-6) if field == "scale" else expected == found
            if not same:
                raise _drift(config, name, field, expected, found)


def attention_layers(module: Any) -> Iterator[tuple[str, Any]]:
    """Names and modules of the decoder's attention layers."""
    layers = [(n, m) for n, m in module.named_modules() if _features(m, "q_proj") or _features(m, "q_b_proj")]
    decoder = [(n, m) for n, m in layers if hasattr(m, "layer_idx")]
    yield from decoder or layers


def _spec_of(layer: Any, config: DrafterConfig, specs: Mapping[str, AttentionSpec]) -> AttentionSpec:
    types, index = config.of_layers("layer_types"), getattr(layer, "layer_idx", None)
    sliding = isinstance(index, int) and types and index < len(types) and types[index] == "sliding_attention"
    named = (spec for name, spec in specs.items() if (name == "sliding") == bool(sliding))
    return next(named, None) or next(iter(specs.values()))


def _facts(layer: Any, spec: AttentionSpec) -> Iterator[tuple[str, Any, Any]]:
    """(field, value in the spec, value in the layer) for all that the layer shows."""
    mla = getattr(layer, "kv_b_proj", None) is not None
    nope = getattr(layer, "qk_nope_head_dim", None)
    shown = [
        ("head_dim", spec.head_dim, getattr(layer, "qk_head_dim" if mla else "head_dim", None)),
        ("value_dim", spec.value_dim, getattr(layer, "v_head_dim", None)),
        (
            "heads * head_dim",
            spec.heads * spec.head_dim,
            _features(layer, "q_proj") or _features(layer, "q_b_proj"),
        ),
        ("kv_heads * head_dim", spec.kv_heads * spec.head_dim, _features(layer, "k_proj")),
        ("kv_heads * value_dim", spec.kv_heads * spec.value_dim, _features(layer, "v_proj")),
        ("scale", spec.scale, getattr(layer, "scaling", None)),
        ("window", spec.mask.window, getattr(layer, "sliding_window", None)),
    ]
    if mla and isinstance(nope, int):
        expanded = spec.heads * (nope + spec.value_dim)
        shown.append(("heads * (qk_nope_head_dim + value_dim)", expanded, _features(layer, "kv_b_proj")))
    yield from (fact for fact in shown if isinstance(fact[2], int | float))


def _features(layer: Any, projection: str) -> int | None:
    value = getattr(getattr(layer, projection, None), "out_features", None)
    return value if isinstance(value, int) else None


def _dtype(layer: Any) -> str | None:
    projection = getattr(layer, "q_proj", None) or getattr(layer, "q_b_proj", None)
    weight = getattr(projection, "weight", None)
    if weight is None or not weight.is_floating_point():
        return None
    return str(weight.dtype).removeprefix("torch.")


def _drift(config: DrafterConfig, layer: str, field: str, expected: object, found: object) -> SpecError:
    return SpecError(
        f"{config.origin}: '{field}' is not what {layer} has",
        expected=f"{field} = {expected}",
        found=f"{field} = {found}",
        remedy="mend the config, or build the module from it",
    )
