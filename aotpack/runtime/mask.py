"""Block masks: what ``Attention.block_mask`` returns and attention takes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aotpack.masks import Lengths
from aotpack.spec import MaskSpec

__all__ = ["BlockMask"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockMask:
    """What one step's mask lets be seen, for every layer that shares it.

    Attributes:
        spec: the rule that it was made by; None for one taken over from torch's ``BlockMask``.
        lengths: sizes of the axes, in tokens; batch is 1 for a mask that all entries share.
        tensors: in the order of the programs' ``mask.*`` inputs: lists of visible 128x128 blocks or, of our
            own CUDA kernels, each draft block's end of the context.
        dense: bool [batch,1,query,key] where the eager fallback made it, else None.
    """

    spec: MaskSpec | None
    lengths: Lengths
    tensors: tuple[Tensor, ...]
    dense: Tensor | None = None

    @property
    def device(self) -> str:
        """The device of the tensors, for example ``"cuda:0"``."""
        return str((self.tensors or (self.dense,))[0].device)  # type: ignore[union-attr]
