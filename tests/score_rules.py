"""Score rules of a user's own, as specs name them."""

from __future__ import annotations

from torch import Tensor

from aotpack.own import inputs
from aotpack.spec import TensorInput

SCALAR = TensorInput(name="temperature", dtype="float32", dims=(), gradient=True)
PER_ENTRY = TensorInput(name="offsets", dtype="bfloat16", dims=("B", "H"), gradient=True)


@inputs(temperature=SCALAR, weights=("float32", "K"))
def tempered(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, temperature: Tensor, weights: Tensor
) -> Tensor:
    """A trained scalar, and a weight for each key that is only read."""
    return score * temperature + weights[kv_idx]


@inputs(offsets=PER_ENTRY, groups=("int64", "Q"), levels=TensorInput(
    name="levels", dtype="float32", dims=("Groups",), gradient=True,
))  # fmt: skip
def grouped(
    score: Tensor,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    offsets: Tensor,
    groups: Tensor,
    levels: Tensor,
) -> Tensor:
    """A bfloat16 offset for each entry and head, and a level looked up through the row's group."""
    return score + offsets[b, h] * 0.5 + levels[groups[q_idx]]
