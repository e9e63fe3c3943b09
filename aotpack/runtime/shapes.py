"""Which of a variant's specialisations a call's shapes fit: a pure function of sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Sizes", "fits"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one call of attention.

    Attributes:
        batch: entries.
        query: query length, in tokens.
        key: key length, in tokens.
        elements: of the largest tensor.
    """

    batch: int
    query: int
    key: int
    elements: int


def fits(bounds: Mapping[str, int], sizes: Sizes) -> bool:
    """Whether a program with these bounds (``aotpack.package.Program``) takes these sizes."""
    return all(_within(name, bound, sizes) for name, bound in bounds.items())


def _within(name: str, bound: int, sizes: Sizes) -> bool:
    match name:
        case "max_batch":
            return sizes.batch <= bound
        case "max_length":
            return sizes.query <= bound and sizes.key <= bound
        case "max_elements":
            return sizes.elements <= bound
        case "divisor":
            return sizes.query % bound == 0 and sizes.key % bound == 0
        case "batch" | "query" | "key":
            return bool(getattr(sizes, name) == bound)
        case "rows":  # of a chunk: the caller cuts any length
            return True
    return False
