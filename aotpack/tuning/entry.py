"""What a tuning record is made of: a chip, and for each kind of attention what was measured and chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning.options import Options

__all__ = ["Attention", "Chip", "Entry", "Measured", "Timed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """What was measured on.

    Attributes:
        name: as the driver reports it, ``"NVIDIA H200"``.
        capability: compute capability, ``(9, 0)``; None for a CPU.
        multiprocessors: of the chip; cores of a CPU.
    """

    name: str
    capability: tuple[int, int] | None
    multiprocessors: int

    def __str__(self) -> str:
        return (
            self.name if self.capability is None else f"{self.name} (sm{''.join(map(str, self.capability))})"
        )

    def suits(self, target: Target) -> bool:
        """Whether a target is for devices of this capability, and no other."""
        return self.capability is not None and self.capability == target.capability


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Which attentions an entry is for; what is None may be anything.

    Attributes:
        heads, kv_heads, head_dim, value_dim, dtype: as in a spec.
        mask: the mask's family and parameters, as JSON values.
        score: family of the score modification, ``"none"`` for none.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    dtype: str | None = None
    mask: Mapping[str, Any] | None = None
    score: str | None = None

    @classmethod
    def of(cls, spec: AttentionSpec) -> Attention:
        """A spec's own: all but the scale and what else no kernel's speed depends on."""
        return cls(
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            dtype=spec.dtype,
            mask=spec.to_dict()["mask"],
            score="none" if spec.score is None else spec.score.family,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what may be anything is left out."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def detail(self) -> int:
        """How many of the fields are said."""
        return len(self.to_dict())

    def covers(self, spec: AttentionSpec) -> bool:
        """Whether a spec is one of these."""
        own = Attention.of(spec).to_dict()
        return all(own[name] == value for name, value in self.to_dict().items())


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """Seconds of one call at one batch, query and key length: median and quartiles of ``count`` turns."""

    lengths: tuple[int, int, int]
    median: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One candidate.

    Attributes:
        options: that it was compiled with.
        ok: whether it may be chosen.
        why: not.
        error: the largest relative error of its results against dense fp64 math, where they were compared.
        timings: at each lengths.
    """

    options: Options
    ok: bool = True
    why: str | None = None
    error: float | None = None
    timings: tuple[Timed, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What was chosen for one kind of attention, direction and length class.

    Attributes:
        attention: what it is for.
        kernels: ``"template"``, ``"dflash"`` or ``"cpu"``.
        direction: ``"forward"`` or ``"backward"``.
        length_class: one of ``CLASSES``.
        options: of the kernels; the others are their own.
        reason: why these, one sentence.
        candidates: all that were measured, in their order.
    """

    attention: Attention
    kernels: str
    direction: str
    length_class: str
    options: Options
    reason: str
    candidates: tuple[Measured, ...] = ()

    @property
    def key(self) -> str:
        """What no two entries of a record share."""
        return json.dumps(
            [self.kernels, self.length_class, self.direction, self.attention.to_dict()], sort_keys=True
        )
