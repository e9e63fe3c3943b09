"""Tile sizes and switches of flex attention's kernels, as its ``kernel_options``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from aotpack.tuning import DIRECTIONS, Options, ordered

__all__ = ["Tiles"]

_BACKWARD: Final = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
# Where the first choice outgrows the device: the 99 KiB of sm_86, sm_89 and sm_120, or large heads.
_SMALLER: Final[Mapping[str, Sequence[Options]]] = {
    "forward": ({"fwd_BLOCK_M": 64, "fwd_BLOCK_N": 32}, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 16}),
    "backward": (dict.fromkeys(_BACKWARD, 32), dict.fromkeys(_BACKWARD, 16)),
}
_PREFIX: Final = {"forward": "fwd_", "backward": "bwd_"}


@dataclass(frozen=True, slots=True)
class Tiles:
    """A choice of tiles for each program, the preferred first; the smaller ones follow."""

    forward: tuple[Options, ...]
    backward: tuple[Options, ...]

    @classmethod
    def preferred(cls, tuned: Mapping[str, Options]) -> Tiles:
        """Options of a tuning by direction come first; what they leave out is Inductor's own choice."""
        first = {
            name: {_PREFIX[name] + option: value for option, value in options.items()}
            for name in DIRECTIONS
            for options in [ordered("template", name, tuned.get(name, {}))]
        }
        return cls(**{name: (first[name], *_SMALLER[name]) for name in DIRECTIONS})

    @property
    def options(self) -> Options:
        """For ``flex_attention``."""
        return {**self.forward[0], **self.backward[0]}

    def smaller(self, program: str) -> Tiles | None:
        """With smaller tiles for ``forward`` or ``backward``; None when there are none."""
        left = getattr(self, program)[1:]
        return replace(self, **{program: left}) if left else None
