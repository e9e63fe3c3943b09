"""A mask rule and a score rule that no family has.

``own_mask.toml`` names them and ``own_mask.py`` trains on them. They are functions of index tensors, as those
of torch's flex_attention, and are traced when the package is built. A trainer that loads the package does not
need this module; ``own_mask.py`` has it to compare with dense math.
"""

from __future__ import annotations

from torch import Tensor

import aotpack

__all__ = ["FIRST", "KINDS", "WINDOW", "streaming", "told_apart"]

WINDOW, FIRST = 48, 4
KINDS = 5


@aotpack.inputs(document=("int64", "B", "K"), place=("int64", "B", "K"))
def streaming(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, document: Tensor, place: Tensor) -> Tensor:
    """Earlier tokens of the row's own document: the last ``WINDOW`` of them and the ``FIRST`` ones, the sinks
    of StreamingLLM (arXiv 2309.17453).

    Args:
        document: number of each token's document, [B, K].
        place: of each token in its document, from 0, [B, K].
    """
    kept = (q_idx - kv_idx < WINDOW) | (place[b, kv_idx] < FIRST)
    return (q_idx >= kv_idx) & (document[b, q_idx] == document[b, kv_idx]) & kept


@aotpack.inputs(
    kind=("int64", "B", "K"),
    table=aotpack.TensorInput(name="table", dtype="float32", dims=("H", KINDS, KINDS), gradient=True),
)
def told_apart(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, kind: Tensor, table: Tensor
) -> Tensor:
    """Adds what each head has learnt of a token of one kind that looks at one of another.

    Args:
        kind: of each token, below ``KINDS``, [B, K].
        table: trained, [H, KINDS, KINDS].
    """
    return score + table[h, kind[b, q_idx], kind[b, kv_idx]]
