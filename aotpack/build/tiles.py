"""Tile sizes of flex attention's kernels, as its ``kernel_options``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

__all__ = ["Tiles"]

_BACKWARD: Final = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
# Inductor's own first. They outgrow the 99 KiB of sm_86, sm_89 and sm_120 where heads are large.
_CHOICES: Final[Mapping[str, Sequence[Mapping[str, int]]]] = {
    "forward": ({}, {"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32}, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16}),
    "backward": ({}, dict.fromkeys(_BACKWARD, 32), dict.fromkeys(_BACKWARD, 16)),
}


@dataclass(frozen=True, slots=True)
class Tiles:
    """A choice of tiles: a place in the list of each program, largest first."""

    forward: int = 0
    backward: int = 0

    @property
    def options(self) -> dict[str, int]:
        """For ``flex_attention``."""
        return {**_CHOICES["forward"][self.forward], **_CHOICES["backward"][self.backward]}

    def smaller(self, program: str) -> Tiles | None:
        """With smaller tiles for ``forward`` or ``backward``; None when there are none."""
        place = getattr(self, program) + 1
        return replace(self, **{program: place}) if place < len(_CHOICES[program]) else None
