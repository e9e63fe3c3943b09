"""What a user says on top of a config: the same two tables from keywords and from a spec file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from aotpack.errors import SpecError
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec

__all__ = ["ATTENTION_FIELDS", "MASK_FIELDS", "SCORE_FIELDS", "Overrides", "named"]

MASK_FIELDS: Final = tuple(f.name for f in fields(MaskSpec))
SCORE_FIELDS: Final = tuple(f.name for f in fields(ScoreSpec))
ATTENTION_FIELDS: Final = tuple(f.name for f in fields(AttentionSpec) if f.name not in ("mask", "score"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Overrides:
    """Fields that win over a config's.

    Attributes:
        mask: fields of ``MaskSpec``.
        attention: fields of ``AttentionSpec`` but ``mask``; ``score`` is a ``ScoreSpec``.
    """

    mask: Mapping[str, Any] = field(default_factory=dict)
    attention: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, **values: Any) -> Overrides:
        """The values that are not None, each in its table."""
        given = {name: value for name, value in values.items() if value is not None}
        return cls(
            mask={k: v for k, v in given.items() if k in MASK_FIELDS},
            attention={k: v for k, v in given.items() if k in ATTENTION_FIELDS},
        )

    @classmethod
    def from_tables(cls, origin: str, tables: Mapping[str, Any]) -> Overrides:
        """The tables of a spec file; ``mask`` and ``score`` may be a name alone.

        Raises:
            SpecError: a key is unknown, or a value of the score is wrong.
        """
        mask = _table(origin, "mask", named(tables.get("mask", {})), MASK_FIELDS)
        attention = _table(origin, "attention", tables.get("attention", {}), ATTENTION_FIELDS)
        if "score" in tables:
            score = _table(origin, "score", named(tables["score"]), SCORE_FIELDS)
            attention = {**attention, "score": ScoreSpec.from_dict(score)}
        return cls(mask=mask, attention=attention)

    def under(self, stronger: Overrides) -> Overrides:
        """These overrides with another's on top."""
        return Overrides(
            mask={**self.mask, **stronger.mask}, attention={**self.attention, **stronger.attention}
        )


def named(rule: Any) -> Any:
    """The table of a rule that is given by its name alone; anything else as it is."""
    return {"family": rule} if isinstance(rule, str) else rule


def _table(origin: str, name: str, table: Any, known: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise SpecError(f"{origin}: '{name}' is wrong", expected=f"a table [{name}]", found=repr(table))
    for key in table:
        if key not in known:
            raise SpecError(
                f"{origin}: unknown key '{name}.{key}'",
                expected=f"one of {', '.join(known)}",
                found=key,
                remedy="remove or rename it",
            )
    return table
