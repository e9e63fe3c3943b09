"""What to compile, and nothing about where: attention and mask specs with a canonical digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from aotpack.errors import SpecError

__all__ = ["DTYPES", "SCHEMA", "AttentionSpec", "MaskSpec", "differences"]

SCHEMA: Final = "aotpack.spec/1"
DTYPES: Final = ("float32", "bfloat16", "float16")


def _bad(field: str, expected: object, found: object, remedy: str | None = None) -> SpecError:
    return SpecError(f"spec field '{field}' is wrong", expected=expected, found=repr(found), remedy=remedy)


def _positive(field: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise _bad(field, "a positive integer", value)


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskSpec:
    """A mask family with its static parameters; the rules are in ``aotpack.masks``.

    Attributes:
        family: name of the rule, for example ``"dflash"``.
        block_size: query rows that one anchor drafts, in tokens (dflash families).
        window: sliding window in tokens; None is no window.
        causal: whether the window also bounds a block's own cells by their offset
            (the windowed ``dflash-speculators`` rule has both variants).
    """

    family: str
    block_size: int | None = None
    window: int | None = None
    causal: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.family, str) or not self.family:
            raise _bad("mask.family", "a mask family's name", self.family)
        for field in ("block_size", "window"):
            if getattr(self, field) is not None:
                _positive(f"mask.{field}", getattr(self, field))
        if self.causal is not None and not isinstance(self.causal, bool):
            raise _bad("mask.causal", "true or false", self.causal)

    def to_dict(self) -> dict[str, Any]:
        """Field values; absent parameters are left out."""
        return _present(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> MaskSpec:
        """Inverse of ``to_dict``; an unknown field is a ``SpecError``."""
        return cls(**_known(cls, "mask", data))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionSpec:
    """One attention to compile. Batch, query length and context length are never part of it.

    Attributes:
        heads: query heads.
        kv_heads: key and value heads; divides ``heads``.
        head_dim: size of a query and key head.
        value_dim: size of a value head; ``head_dim`` when not given.
        dtype: of q, k, v and the output: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        scale: factor of the scores before softmax; ``head_dim ** -0.5`` when not given.
        mask: which cells are visible.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    dtype: str
    scale: float = math.nan
    mask: MaskSpec

    def __post_init__(self) -> None:
        for field in ("heads", "kv_heads", "head_dim"):
            _positive(field, getattr(self, field))
        if self.heads % self.kv_heads:
            raise _bad("kv_heads", f"a divisor of heads={self.heads}", self.kv_heads)
        if self.value_dim in (0, None):
            object.__setattr__(self, "value_dim", self.head_dim)
        _positive("value_dim", self.value_dim)
        if self.dtype not in DTYPES:
            raise _bad("dtype", " or ".join(DTYPES), self.dtype)
        if self.scale is None or (isinstance(self.scale, float) and math.isnan(self.scale)):
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        if not isinstance(self.scale, (int, float)) or not 0 < self.scale < math.inf:
            raise _bad("scale", "a positive finite number", self.scale)
        object.__setattr__(self, "scale", float(self.scale))
        if not isinstance(self.mask, MaskSpec):
            raise _bad("mask", "a MaskSpec", self.mask)

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def to_dict(self) -> dict[str, Any]:
        """Field values with the schema, ready for JSON."""
        return {"schema": SCHEMA, **_present(self), "mask": self.mask.to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Inverse of ``to_dict``; an unknown schema or field is a ``SpecError``."""
        data = dict(data)
        if (schema := data.pop("schema", SCHEMA)) != SCHEMA:
            raise _bad("schema", SCHEMA, schema, "read it with the aotpack release that wrote it")
        values = _known(cls, "", data)
        if not isinstance(values.get("mask"), Mapping):
            raise _bad("mask", "a table with the mask's family", values.get("mask"))
        return cls(**{**values, "mask": MaskSpec.from_dict(values["mask"])})

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, shortest round-trip floats."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def differences(expected: AttentionSpec, found: AttentionSpec) -> list[str]:
    """One line ``field: expected X, found Y`` for each field in which two specs differ."""
    left, right = _flat(expected.to_dict()), _flat(found.to_dict())
    return [
        f"{name}: expected {left.get(name)}, found {right.get(name)}"
        for name in [*left, *(n for n in right if n not in left)]
        if left.get(name) != right.get(name)
    ]


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat


def _present(spec: Any) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) is not None}


def _known(cls: Any, prefix: str, data: Mapping[str, Any]) -> dict[str, Any]:
    names = [f.name for f in fields(cls)]
    for key in data:
        if key not in names:
            raise _bad(
                f"{prefix}.{key}".lstrip("."), f"one of {', '.join(names)}", key, "remove or rename it"
            )
    required = {"family"} if cls is MaskSpec else {"heads", "kv_heads", "head_dim", "dtype", "mask"}
    for key in sorted(required - data.keys()):
        raise _bad(f"{prefix}.{key}".lstrip("."), "a value", None, "add it")
    return dict(data)
