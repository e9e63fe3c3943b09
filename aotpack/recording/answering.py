"""What a recorded call of flex_attention returns: dense math, differentiable, also on fake tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from aotpack.errors import SpecError
from aotpack.graph import Graph

__all__ = ["Rule", "attend", "check_blocks", "kind", "visible_cells"]


class Rule:
    """A recorded function and the tensors of this call."""

    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor]) -> None:
        self.graph = graph
        self.tensors = tensors

    def cells(self, score: Tensor) -> Tensor:
        """The rule's value for scores [B,H,Q,K]."""
        b, h, q, kv = (
            torch.arange(size, device=score.device).view([-1 if i == axis else 1 for i in range(4)])
            for axis, size in enumerate(score.shape)
        )
        return self.graph.bind(self.tensors)({"b": b, "h": h, "q": q, "kv": kv, "score": score})

    def lives_with(self, tensor: Tensor) -> bool:
        """Whether its tensors are real where that one is, and fake where it is."""
        return all(kind(tensor) == kind(other) for other in self.tensors.values())


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, visible: Tensor | None, score: Rule | None
) -> tuple[Tensor, Tensor]:
    """Attention in float32: out [B,H,Q,Dv] of v's dtype, and lse [B,H,Q] float32.

    Args:
        q: [B,H,Q,D].
        k: [B,Hk,K,D].
        v: [B,Hk,K,Dv].
        scale: factor of the scores.
        visible: bool, broadcasts to [B,H,Q,K]; None for every cell.
        score: changes the scores; None for no change.
    """
    group = q.shape[1] // k.shape[1]
    keys, values = (tensor.float().repeat_interleave(group, dim=1) for tensor in (k, v))
    scores = q.float() @ keys.mT * scale
    if score is not None:
        scores = score.cells(scores).to(scores.dtype).expand(scores.shape)
    if visible is not None:
        scores = scores.masked_fill(~visible, -math.inf)
    empty = (scores == -math.inf).all(-1, keepdim=True)
    # An empty row goes through as zeros, because the gradient of its softmax would be NaN.
    safe = scores.masked_fill(empty, 0)
    weights = safe.softmax(-1).masked_fill(empty, 0)
    lse = safe.logsumexp(-1).masked_fill(empty.squeeze(-1), -math.inf)
    return (weights @ values).to(v.dtype), lse


def visible_cells(mask: Rule, like: Tensor) -> Tensor:
    """bool, broadcasts to the shape [B,H,Q,K] of ``like``."""
    visible = mask.cells(like)
    return visible if visible.dtype == torch.bool else visible != 0


def check_blocks(function: str, block_mask: Any, visible: Tensor) -> None:
    """Refuses a BlockMask whose lists of blocks are not what its function says.

    Args:
        function: of the mask.
        block_mask: torch's.
        visible: bool [B,1,Q,K].
    """
    rows, columns = (min(size, n) for size, n in zip(block_mask.BLOCK_SIZE, visible.shape[2:], strict=True))
    padding = (0, -visible.shape[3] % columns, 0, -visible.shape[2] % rows)
    padded = torch.nn.functional.pad(visible, padding)
    counts = padded.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).sum((3, 5))
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    # A block on the edge is full when its cells inside of the axes are.
    inside = torch.nn.functional.pad(torch.ones_like(visible), padding)
    room = inside.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).sum((3, 5))
    hidden = (counts > 0) & ~(partial | full)
    shown = full & (counts < room)
    if bool(hidden.any()) or bool(shown.any()):
        raise SpecError(
            f"the BlockMask's blocks are not those of its mask function '{function}'",
            expected="the blocks that create_block_mask makes of the function",
            found=f"{int(hidden.sum())} blocks hidden and {int(shown.sum())} shown as a whole against it",
            remedy="say in the mask function what the lists say, and make them with create_block_mask",
        )


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """bool [B,H,rows,columns]: the blocks in a list."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
    return torch.zeros_like(listed).scatter(-1, indices.long(), listed)


def kind(tensor: Tensor) -> str:
    """``"real"``, ``"fake"`` (of a FakeTensorMode) or ``"meta"``."""
    return "fake" if isinstance(tensor, FakeTensor) else "meta" if tensor.is_meta else "real"
