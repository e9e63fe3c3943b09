"""Dense attention with the call shape of a compiled one: what a user's own attention would be."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aotpack.dense import dense_attention
from aotpack.masks import Lengths, dense
from aotpack.spec import AttentionSpec, MaskSpec

TINY = AttentionSpec(
    heads=4, kv_heads=2, head_dim=8, dtype="float32", mask=MaskSpec(family="dflash", block_size=4)
)


@dataclass(frozen=True)
class DenseAttend:
    """Holds every score."""

    spec: AttentionSpec = TINY

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> Tensor:
        rows = anchors.shape[1] * self.spec.mask.block_size
        lengths = Lengths(batch=anchors.shape[0], query=rows, key=context_len + rows)
        return dense(self.spec.mask, {"anchors": anchors, "keep": keep}, lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return dense_attention(q, k, v, mask, self.spec.scale)[0]
