"""Opening a drafter's config: a file, a folder, a mapping or a live transformers config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aotpack.errors import SpecError

__all__ = ["DrafterConfig", "open_config", "read_text"]

_SIZES: Final = (
    "head_dim",
    "hidden_size",
    "kv_lora_rank",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "sliding_window",
    "v_head_dim",
)
_LAYER_KEYS: Final = ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window")


@dataclass(frozen=True, kw_only=True, slots=True)
class DrafterConfig:
    """A drafter's config with its parts told apart.

    Attributes:
        origin: how messages call it.
        top: the whole config: what was in the file, or the live config.
        text: transformers' config of the decoder layers.
        written: the section for the decoder layers as its author wrote it; None for a live config,
            in which a default cannot be told from a written value.
    """

    origin: str
    top: Any
    text: Any
    written: Mapping[str, Any] | None

    def get(self, name: str) -> Any:
        """A value from the layers' section or else the whole config; None where neither has it."""
        value = self.of_layers(name)
        return self.of_drafter(name) if value is None else value

    def of_layers(self, name: str) -> Any:
        """A value from the section for the decoder layers, as written or else as transformers has it."""
        try:
            value = getattr(self.text, name, None)
        except RuntimeError as error:
            raise SpecError(
                f"{self.origin}: '{name}' differs from layer to layer",
                expected="one value for all layers",
                found=str(error).partition(". ")[0],
                remedy=f"write a TOML spec file with [specs.NAME] tables, or say {name} in [attention]",
            ) from error
        written = None if self.written is None else self.written.get(name)
        return value if written is None else written

    def of_drafter(self, name: str) -> Any:
        """A value from the whole config."""
        return self.top.get(name) if isinstance(self.top, Mapping) else getattr(self.top, name, None)

    def size(self, name: str) -> int:
        """A positive integer that must have been written: a class's default is not the drafter's."""
        value = self.get(name) if self.says(name) else None
        if type(value) is not int or value < 1:
            raise self.wrong(name, "a positive integer", value)
        return value

    def says(self, name: str) -> bool:
        """Whether the author wrote a value; always true of a live config."""
        if self.written is None:
            return True
        alias = getattr(type(self.text), "attribute_map", {}).get(name, name)
        return any(self.written.get(key) is not None for key in (name, alias))

    def wrong(self, name: str, expected: object, value: object) -> SpecError:
        """The error for a field with a wrong value or, when the value is None, without one."""
        if value is None:
            return SpecError(
                f"{self.origin}: '{name}' is missing",
                expected=expected,
                remedy="add it to the config, or say it in a TOML spec file",
            )
        return SpecError(f"{self.origin}: '{name}' is wrong", expected=expected, found=repr(value))


def open_config(source: Any, *, origin: str = "drafter config") -> DrafterConfig:
    """A drafter's config from a path, a mapping or a live config object; nothing is fetched.

    Raises:
        SpecError: missing, malformed, or refused by transformers' config class.
    """
    if isinstance(source, str | Path):
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        origin = f"drafter config '{path}'"
        source = _load(path, origin)
    if isinstance(source, Mapping):
        return _from_mapping(source, origin)
    if not hasattr(source, "get_text_config"):
        raise SpecError(
            f"{origin}: this is no config",
            expected="a path, a mapping or a transformers config",
            found=type(source).__name__,
        )
    nested = getattr(source, "transformer_layer_config", None)
    text = source.get_text_config(decoder=True) if nested is None else nested
    if isinstance(text, Mapping):
        text = _parsed({**text}, origin)
    return DrafterConfig(origin=origin, top=source, text=text, written=None)


def read_text(path: Path, origin: str) -> str:
    """The text of a file; a file that cannot be read is a ``SpecError``."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise SpecError(
            f"{origin} does not exist",
            expected="a config.json, a folder with one, or a TOML spec file",
            remedy="give a local path; nothing is downloaded here",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{origin} cannot be read", expected="UTF-8 text", found=str(error)) from error


def _load(path: Path, origin: str) -> Mapping[str, Any]:
    try:
        data = json.loads(read_text(path, origin))
    except (json.JSONDecodeError, RecursionError) as error:
        raise SpecError(f"{origin} is not JSON", expected="a HF config.json", found=str(error)) from error
    if not isinstance(data, dict):
        raise SpecError(f"{origin} is wrong", expected="a JSON object", found=type(data).__name__)
    return data


def _from_mapping(raw: Mapping[str, Any], origin: str) -> DrafterConfig:
    nested = raw.get("transformer_layer_config")
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise SpecError(
                f"{origin}: 'transformer_layer_config' is wrong", expected="an object", found=repr(nested)
            )
        written = {**nested, **{k: raw[k] for k in _LAYER_KEYS if raw.get(k) is not None}}
        return DrafterConfig(origin=origin, top=raw, text=_parsed(written, origin), written=written)
    config = _parsed(dict(raw), origin)
    try:
        text = config.get_text_config(decoder=True)
    except ValueError as error:
        raise SpecError(
            f"{origin}: its text config is ambiguous",
            expected="one text config",
            found=str(error),
            remedy="give the text config itself",
        ) from error
    sections = ("text_config", "decoder", "generator")
    section = next((raw[k] for k in sections if getattr(config, k, None) is text and k in raw), raw)
    return DrafterConfig(origin=origin, top=raw, text=text, written=section)


def _parsed(raw: dict[str, Any], origin: str) -> Any:
    """transformers' config object of a mapping, its own class where it knows the model type."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, PretrainedConfig

    for name in _SIZES:
        value = raw.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise SpecError(f"{origin}: '{name}' is wrong", expected="a positive integer", found=repr(value))
    if raw.get("head_dim", 0) is None:
        del raw["head_dim"]
    model_type = raw.get("model_type")
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    config_class = CONFIG_MAPPING[model_type] if known else PretrainedConfig
    try:
        return config_class.from_dict(raw)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SpecError(
            f"{origin}: transformers cannot read it",
            expected=f"a valid config of model_type {model_type!r}",
            found=" ".join(str(error).split()),
            remedy="mend the field that is named",
        ) from error
