"""One attention to compile, with its canonical JSON and digest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from aotpack.spec.mask import MaskSpec
from aotpack.spec.score import ScoreSpec
from aotpack.spec.values import finite, flag, known, positive, present, wrong

__all__ = ["DTYPES", "PRECISIONS", "SCHEMA", "AttentionSpec", "differences"]

SCHEMA: Final = "aotpack.spec/1"
DTYPES: Final = ("float32", "bfloat16", "float16")
PRECISIONS: Final = ("highest", "high")
_REQUIRED: Final = frozenset({"heads", "kv_heads", "head_dim", "dtype", "mask"})


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
        score: how scores are changed before, or in, the softmax; None is not at all.
        matmul_precision: of float32 products, as in ``torch.set_float32_matmul_precision``: ``"highest"``
            (the default, and what the CPU always computes in) or ``"high"`` (TF32 on CUDA). None for the
            other dtypes.
        deterministic: whether gradients must be bit-equal from run to run; refused for specs that cannot.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    dtype: str
    scale: float = math.nan
    mask: MaskSpec
    score: ScoreSpec | None = None
    matmul_precision: str | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        self._check_sizes()
        if self.dtype not in DTYPES:
            raise wrong("dtype", " or ".join(DTYPES), self.dtype)
        if self.scale is None or (isinstance(self.scale, float) and math.isnan(self.scale)):
            object.__setattr__(self, "scale", self.head_dim**-0.5)
        object.__setattr__(self, "scale", finite("scale", self.scale))
        if not isinstance(self.mask, MaskSpec):
            raise wrong("mask", "a MaskSpec", self.mask)
        if self.score is not None and not isinstance(self.score, ScoreSpec):
            raise wrong("score", "a ScoreSpec or None", self.score)
        self._check_precision()
        flag("deterministic", self.deterministic)

    def _check_sizes(self) -> None:
        for field in ("heads", "kv_heads", "head_dim"):
            positive(field, getattr(self, field))
        if self.heads % self.kv_heads:
            raise wrong("kv_heads", f"a divisor of heads={self.heads}", self.kv_heads)
        if self.value_dim in (0, None):
            object.__setattr__(self, "value_dim", self.head_dim)
        positive("value_dim", self.value_dim)

    def _check_precision(self) -> None:
        if self.dtype != "float32":
            if self.matmul_precision not in (None, PRECISIONS[0]):
                raise wrong("matmul_precision", f"none for {self.dtype}", self.matmul_precision)
            object.__setattr__(self, "matmul_precision", None)
            return
        if self.matmul_precision is None:
            object.__setattr__(self, "matmul_precision", PRECISIONS[0])
        if self.matmul_precision not in PRECISIONS:
            raise wrong("matmul_precision", " or ".join(PRECISIONS), self.matmul_precision)

    @property
    def group_size(self) -> int:
        """Query heads that share one key head."""
        return self.heads // self.kv_heads

    def to_dict(self) -> dict[str, Any]:
        """Field values with the schema, ready for JSON.

        Fields that came after the schema's first release are left out at their defaults, so that a spec keeps
        its digest.
        """
        values = present(self)
        if not self.deterministic:
            del values["deterministic"]
        if self.matmul_precision == PRECISIONS[0]:
            del values["matmul_precision"]
        return {"schema": SCHEMA, **values}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> AttentionSpec:
        """Inverse of ``to_dict``; an unknown schema or field is a ``SpecError``.

        A mask or score may be given as a name alone: ``mask = "causal"``, ``score = "my_pkg.scores:bias"``.
        """
        data = dict(data)
        if (schema := data.pop("schema", SCHEMA)) != SCHEMA:
            raise wrong("schema", SCHEMA, schema, "read it with the aotpack release that wrote it")
        values = known(cls, "", data, _REQUIRED)
        values["mask"] = _rule(MaskSpec, "mask", values.get("mask"))
        if values.get("score") is not None:
            values["score"] = _rule(ScoreSpec, "score", values["score"])
        return cls(**values)

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


def _rule(kind: type[MaskSpec] | type[ScoreSpec], field: str, value: object) -> Any:
    if isinstance(value, str):
        value = {"family": value}
    if not isinstance(value, Mapping):
        raise wrong(field, f"a table with the {field}'s family", value)
    return kind.from_dict(value)


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value})
    return flat
