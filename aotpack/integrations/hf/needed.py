"""The specs that a model needs, from a pass of it on the meta device."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import AotpackError, InputError, SpecError
from aotpack.integrations.hf.layer import LayerMask, key_of, spec_of
from aotpack.integrations.hf.registry import enter, layer_mask
from aotpack.integrations.hf.structure import Structure
from aotpack.spec import DTYPES, AttentionSpec

__all__ = ["needed"]

_NAME: Final = "aotpack-specs"
_TOKENS: Final = 8
_lock: Final = threading.Lock()


class _Planner:
    """Registered in place of a package: notes what layers ask for."""

    def __init__(self) -> None:
        self.found: dict[AttentionSpec, Structure] = {}

    def mask(self, **arguments: Any) -> LayerMask:
        return layer_mask(**arguments)

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        wanted = key_of(module, query, key, value, attention_mask, **options)
        self.found.setdefault(spec_of(wanted), attention_mask.structure)
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3])), None


def needed(model: Any, padded: bool, packed: bool, dtype: str | None) -> dict[str, AttentionSpec]:
    """As ``aotpack.integrations.transformers.specs``."""
    config, kind = _opened(model)
    dtype = dtype or str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise SpecError("the model has a dtype that no spec has", expected=" or ".join(DTYPES), found=dtype)
    with _lock:
        planner = _Planner()
        enter(_NAME, planner)
        _run(config, kind, getattr(torch, dtype))
    if not planner.found:
        raise SpecError(
            f"{config.model_type}: no layer of the model uses attention",
            expected="a model that transformers runs with flex_attention",
            found=type(config).__name__,
        )
    return _named(list(_variants(planner.found, padded, packed)))


def _opened(model: Any) -> tuple[Any, Any]:
    """The config of the language model, and a class that makes it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    if isinstance(model, str | Path):
        if not Path(model).exists():
            raise InputError("there is no such model", expected="a folder or a config.json", found=model)
        try:
            model = AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            raise SpecError(
                f"{model}: the config cannot be read",
                expected="a config.json of transformers",
                found=error,
            ) from error
    elif isinstance(model, torch.nn.Module):
        inner: Any = getattr(model, "module", model)
        inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
        dtype = next((p.dtype for p in inner.parameters() if p.is_floating_point()), None)
        kind, model = type(inner), copy.deepcopy(inner.config)
        model.dtype = dtype
    if not hasattr(model, "get_text_config"):
        raise InputError(
            "this is no model of transformers",
            expected="a model, its config, or a folder with one",
            found=type(model).__name__,
        )
    text = copy.deepcopy(model.get_text_config(decoder=True))
    text.dtype = getattr(text, "dtype", None) or getattr(model, "dtype", None)
    return text, kind if type(text) is type(model) else AutoModelForCausalLM


def _run(config: Any, kind: Any, dtype: torch.dtype) -> None:
    """One forward pass without weights or values."""
    make = kind.from_config if kind.__name__.startswith("Auto") else kind._from_config
    try:
        with torch.device("meta"), torch.no_grad():
            model = make(config, attn_implementation=_NAME, dtype=dtype)
            if hasattr(config, "_experts_implementation"):
                # The others look at values, which there are none of.
                model.set_experts_implementation("batched_mm")
            ids = torch.zeros((1, _TOKENS), dtype=torch.int64)
            # With a cache, because transformers would look at position_ids for packed sequences without one.
            model.train()(input_ids=ids, use_cache=True)
    except AotpackError:
        raise
    except Exception as error:
        raise SpecError(
            f"{config.model_type}: the model cannot be run without values",
            expected="a language model of transformers, and a forward pass of it on the meta device",
            found=f"{type(error).__name__}: {_first_line(error)}",
            remedy="write its specs by hand: a layer that finds none in a package says which it needs",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _variants(
    found: dict[AttentionSpec, Structure], padded: bool, packed: bool
) -> Iterator[tuple[str, AttentionSpec]]:
    for spec, structure in found.items():
        forms = [structure]
        if padded:
            forms.append(replace(structure, padded=True))
        # Chunks of packed sequences have no mask family.
        if packed and structure.causal and structure.chunk is None:
            forms.append(replace(structure, packed=True))
        for form in forms:
            yield form.name, replace(spec, mask=form.mask)


def _named(found: list[tuple[str, AttentionSpec]]) -> dict[str, AttentionSpec]:
    """Names that are unique; those of several specs are numbered."""
    alike: dict[str, list[AttentionSpec]] = {}
    for name, spec in found:
        alike.setdefault(name, []).append(spec)
    return {
        name if len(specs) == 1 else f"{name}{place}": spec
        for name, specs in alike.items()
        for place, spec in enumerate(specs)
    }
