"""What a capture found: specs by name, and every call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from aotpack.spec import AttentionSpec

__all__ = ["Call", "Captured", "named"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One call of flex_attention.

    Attributes:
        spec: name of its spec.
        batch: entries of q.
        query_len: rows of q, in tokens.
        key_len: rows of k and v, in tokens.
        return_lse: whether the log-sum-exp was asked for.
        kernel_options: as the caller gave them; a build chooses its own.
        tensors: for each tensor that the spec's mask and score take, the variable that held it.
    """

    spec: str
    batch: int
    query_len: int
    key_len: int
    return_lse: bool
    kernel_options: Mapping[str, Any]
    tensors: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Captured(Mapping[str, AttentionSpec]):
    """The specs that a model needs, by name, as ``aotpack.build.build`` takes them.

    Attributes:
        specs: one for each kind of attention; equal calls share one. A mask of a named family has its name,
            any other ``attention0``, ``attention1``, ...
        calls: every call, in order.
    """

    specs: Mapping[str, AttentionSpec]
    calls: tuple[Call, ...]

    def __getitem__(self, name: str) -> AttentionSpec:
        return self.specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def named(specs: list[AttentionSpec]) -> dict[str, AttentionSpec]:
    """The different specs among these, in order, by name."""
    stems = {spec: _stem(spec) for spec in specs}
    found: dict[str, AttentionSpec] = {}
    for spec, stem in stems.items():
        alike = [other for other, theirs in stems.items() if theirs == stem]
        numbered = stem == "attention" or len(alike) > 1
        found[f"{stem}{alike.index(spec)}" if numbered else stem] = spec
    return found


def _stem(spec: AttentionSpec) -> str:
    plain = spec.mask.parts is None and spec.mask.graph is None
    return spec.mask.family if plain and spec.score is None else "attention"
