"""Shape classes that attention on CUDA is compiled for; the runtime takes the first that fits a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aotpack.build.blocks import BLOCK

__all__ = ["ATTENTION", "BLOCK_MASK", "MAX_BATCH", "MAX_LENGTH", "Specialisation", "exact"]

# Inductor takes 64-bit indices where the declared maxima say that a tensor may pass 2**31 elements, and
# 32-bit ones where no maximum is declared. A product of all must stay below 1e20, which counts as none.
MAX_BATCH: Final = (1 << 16) - 1
MAX_LENGTH: Final = 1 << 22
_ANY: Final = {"max_batch": MAX_BATCH, "max_length": MAX_LENGTH}
_INT32: Final = (1 << 31) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Specialisation:
    """A shape class, under the name and with the bounds that the manifest's ``Program`` records."""

    name: str
    bounds: Mapping[str, int]

    @property
    def divisor(self) -> int:
        """What the query and key lengths are multiples of."""
        return self.bounds.get("divisor", 1)

    @property
    def whole(self) -> bool:
        """Whether the query and key lengths are multiples of a block of the mask."""
        lengths = [self.fixed[axis] for axis in "QK" if axis in self.fixed] or [self.divisor]
        return all(length % BLOCK == 0 for length in lengths)

    @property
    def narrow(self) -> bool:
        """Whether 32-bit indices reach every element of every tensor."""
        return self.bounds.get("max_elements", _INT32 + 1) <= _INT32

    @property
    def fixed(self) -> Mapping[str, int]:
        """Sizes of the axes B, Q and K that are not dynamic."""
        names = {"batch": "B", "query": "Q", "key": "K"}
        return {names[name]: size for name, size in self.bounds.items() if name in names}


def exact(batch: int, query: int, key: int) -> Specialisation:
    """One shape and no other."""
    bounds = {"batch": batch, "query": query, "key": key, "max_elements": _INT32}
    return Specialisation(name=f"b{batch}.q{query}.k{key}", bounds=bounds)


_NARROW: Final = {**_ANY, "max_elements": _INT32}
# The tightest first.
ATTENTION: Final = (
    Specialisation(name="div128", bounds={**_NARROW, "divisor": BLOCK}),
    Specialisation(name="int32", bounds=_NARROW),
    Specialisation(name="general", bounds=_ANY),
)
# 2**31 blocks are 3.5e13 cells: no mask needs wider indices, and one that does is refused.
BLOCK_MASK: Final = Specialisation(name="general", bounds=_NARROW)
