"""Scored attention on the CPU: dense math over a chunk of query rows, forward and backward.

The block-sparse kernels take no score rule. These programs hold rows x keys scores instead of one tile, and
the caller chooses the rows. Visible cells are rebuilt from the block lists and tiles, so one pair of programs
serves every mask. All axes are whole blocks of 128; rows and keys beyond the real ones are hidden.

Sums over keys and rows are made of products of 128 terms each: MKL splits longer ones by the thread count,
and results would depend on it.
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim

from aotpack.build.blocks import BLOCK, MASK_TENSORS
from aotpack.build.programs import TILE_TENSORS, Program
from aotpack.scores import family_of, join_sinks, sinks_gradient
from aotpack.spec import AttentionSpec
from aotpack.spec.tensors import shape_of

__all__ = ["BOUNDS", "backward_program", "forward_program"]

# Of both programs: the query rows of one call are a multiple of this, as are the keys.
BOUNDS: Final = {"rows": BLOCK}
_ROW_LISTS: Final = MASK_TENSORS[:4]
_OUTPUTS: Final = ("out", "lse")
# Example sizes, in blocks for lengths; no two alike.
_BATCH, _ROWS, _COLUMNS, _TILES, _QUERY, _KEY, _FREE = 2, 3, 5, 7, 331, 613, 101


def forward_program(spec: AttentionSpec) -> Program:
    """Inputs: q, k, v, the mask's row lists and tiles, ``rows`` and the score's tensors; outputs out and lse.

    q is [B,H,R,D] and k, v [B,Hk,K,...], float32, R and K whole blocks. ``rows`` is int64 [3]: the first row
    of the chunk, then the real query and key length.
    """
    return _program(spec, _Forward, _inputs(spec), _OUTPUTS)


def backward_program(spec: AttentionSpec) -> Program:
    """Inputs: grad.out, grad.lse, forward's inputs, out and lse; outputs the gradients, float32."""
    trained = tuple(f"grad.score.{given.name}" for given in _family(spec).trained)
    rows = (("B", spec.heads, "R", spec.value_dim), torch.float32), (("B", spec.heads, "R"), torch.float32)
    outputs = dict(zip(_OUTPUTS, rows, strict=True))
    gradients = {f"grad.{name}": given for name, given in outputs.items()}
    inputs = {**gradients, **_inputs(spec), **outputs}
    return _program(spec, _Backward, inputs, ("grad.q", "grad.k", "grad.v", *trained))


class _Chunk(torch.nn.Module):
    def __init__(self, spec: AttentionSpec, names: tuple[str, ...]) -> None:
        super().__init__()
        self.spec, self.names, self.family = spec, names, _family(spec)

    def named(self, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
        return dict(zip(self.names, args, strict=True))

    def score_tensors(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """Those with a gradient in float32, in which it is summed."""
        trained = {each.name for each in self.family.trained}
        return {
            each.name: tensor.float() if each.name in trained else tensor
            for each in self.family.inputs
            for tensor in (given[f"score.{each.name}"],)
        }

    def scores(self, given: dict[str, Tensor]) -> Tensor:
        """[B,H,R,K], scaled."""
        q, k = given["q"], given["k"]
        group = self.spec.group_size
        grouped = q.unflatten(1, (-1, group)).flatten(2, 3)
        scores: Tensor = (grouped @ k.mT * self.spec.scale).unflatten(2, (group, -1)).flatten(1, 2)
        return scores

    def modified(self, given: dict[str, Tensor], score: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        """[B,H,R,K], hidden cells -inf."""
        first, query, key = (given["rows"][i] for i in range(3))
        b, h, q, kv = (
            torch.arange(size).view([-1 if i == axis else 1 for i in range(4)])
            for axis, size in enumerate(score.shape)
        )
        q = q + first
        at = (b, h, torch.where(q < query, q, 0), torch.where(kv < key, kv, 0))
        return torch.where(_visible(given), self.family.modify(score, tensors, *at), -math.inf)


class _Forward(_Chunk):
    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        given = self.named(args)
        tensors = self.score_tensors(given)
        scores = self.modified(given, self.scores(given), tensors)
        top = scores.amax(-1, keepdim=True)
        empty = top == -math.inf
        top = torch.where(empty, 0, top)
        weights = torch.exp(scores - top)
        total = torch.where(empty, 1, weights.sum(-1, keepdim=True))
        lse = torch.where(empty, -math.inf, top + torch.log(total)).squeeze(-1)
        group = self.spec.group_size
        out = _sum_of_products(_grouped(weights / total, group), given["v"])
        out = out.unflatten(2, (group, -1)).flatten(1, 2)
        if self.family.sinks is None:
            return out, lse
        return join_sinks(out, lse, tensors[self.family.sinks])


class _Backward(_Chunk):
    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        given = self.named(args)
        lse, group = given["lse"], self.spec.group_size
        empty = lse == -math.inf
        # What a caller's loss makes of an empty row is not read: it may be NaN.
        grad_lse = torch.where(empty, 0, given["grad.lse"])
        grad_out = torch.where(empty.unsqueeze(-1), 0, given["grad.out"])
        slope = (grad_out * given["out"]).sum(-1) - grad_lse
        tensors = self.score_tensors(given)
        trained = [each.name for each in self.family.trained if each.name != self.family.sinks]
        with torch.enable_grad():
            score = self.scores(given).detach().requires_grad_()
            leaves = {name: tensors[name].detach().requires_grad_() for name in trained}
            modified = self.modified(given, score, {**tensors, **leaves})
            weights = torch.exp(modified.detach() - torch.where(empty, 0, lse).unsqueeze(-1))
            grad_v, grad = _grouped(grad_out, group), given["v"]
            grad = (grad_v @ grad.mT).unflatten(2, (group, -1)).flatten(1, 2)
            grad = weights * (grad - slope.unsqueeze(-1))
            grad, *of_tensors = torch.autograd.grad(modified, [score, *leaves.values()], grad)
        # A rule's slope may be infinite where the mask hides the score.
        grad = torch.where(modified.detach() == -math.inf, 0, grad) * self.spec.scale
        grad, weights = _grouped(grad, group), _grouped(weights, group)
        dq = _sum_of_products(grad, given["k"]).unflatten(2, (group, -1)).flatten(1, 2)
        dk = _sum_of_products(grad.mT, _grouped(given["q"], group))
        dv = _sum_of_products(weights.mT, grad_v)
        if (sinks := self.family.sinks) is not None and any(g.name == sinks for g in self.family.trained):
            of_tensors.append(sinks_gradient(grad_out, grad_lse, given["out"], lse, tensors[sinks]))
        return (dq, dk, dv, *of_tensors)


def _grouped(rows: Tensor, group: int) -> Tensor:
    """[B,H,R,X] as [B,Hk,group * R,X]."""
    grouped: Tensor = rows.unflatten(1, (-1, group)).flatten(2, 3)
    return grouped


def _sum_of_products(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, [B,Hk,M,S] and [B,Hk,S,N], S whole blocks, each of them multiplied on its own."""
    parts: Tensor = a.unflatten(-1, (-1, BLOCK)).movedim(-2, 2) @ b.unflatten(2, (-1, BLOCK))
    return parts.sum(2)


def _visible(given: dict[str, Tensor]) -> Tensor:
    """bool [B,1,R,K]."""
    partial, full = (
        _listed(given[f"mask.{prefix}kv_num_blocks"], given[f"mask.{prefix}kv_indices"])
        for prefix in ("", "full_")
    )
    tiles = given["mask.tiles"][torch.where(partial, given["mask.tile_ids"].squeeze(1), 0).long()]
    bits = tiles.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    cells = bits.flatten(-2).bool() & partial[..., None, None] | full[..., None, None]
    return cells.transpose(2, 3).flatten(3, 4).flatten(1, 2).unsqueeze(1)


def _listed(counts: Tensor, indices: Tensor) -> Tensor:
    """bool [B,rows,columns]: the blocks among the first ``counts`` of their row's list."""
    columns = torch.arange(indices.shape[-1])
    listed = (indices.unsqueeze(-1) == columns) & (columns < counts.unsqueeze(-1)).unsqueeze(-1)
    return listed.any(-2).squeeze(1)


def _family(spec: AttentionSpec) -> Any:
    assert spec.score is not None
    return family_of(spec.score)


_Axes = tuple[str | int, ...]


def _inputs(spec: AttentionSpec) -> dict[str, tuple[_Axes, torch.dtype]]:
    real, listed = torch.float32, torch.int32
    rows, grid = ("B", 1, "Rb"), ("B", 1, "Rb", "Kb")
    return {
        "q": (("B", spec.heads, "R", spec.head_dim), real),
        "k": (("B", spec.kv_heads, "K", spec.head_dim), real),
        "v": (("B", spec.kv_heads, "K", spec.value_dim), real),
        **{f"mask.{name}": (grid if "indices" in name else rows, listed) for name in _ROW_LISTS},
        f"mask.{TILE_TENSORS[0]}": (("P", BLOCK, BLOCK // 8), torch.uint8),
        f"mask.{TILE_TENSORS[1]}": (grid, listed),
        "rows": ((3,), torch.int64),
        **{
            f"score.{given.name}": (
                tuple(_score_axis(spec, axis) for axis in given.dims),
                getattr(torch, given.dtype),
            )
            for given in _family(spec).inputs
        },
    }


def _score_axis(spec: AttentionSpec, axis: str | int) -> str | int:
    # Of the real lengths, which a chunk's whole blocks are not.
    return spec.heads if axis == "H" else f"score {axis}" if axis in ("Q", "K") else axis


def _program(
    spec: AttentionSpec,
    module: type[_Chunk],
    inputs: dict[str, tuple[_Axes, torch.dtype]],
    outputs: tuple[str, ...],
) -> Program:
    blocks = {"Rb": Dim("Rb", min=1, max=1 << 15), "Kb": Dim("Kb", min=1, max=1 << 15)}
    dims: dict[str, Any] = {"B": Dim("B", min=1, max=(1 << 16) - 1), "P": Dim("P", min=1, max=1 << 30)}
    dims |= {**blocks, "R": BLOCK * blocks["Rb"], "K": BLOCK * blocks["Kb"]}
    sizes = {"B": _BATCH, "P": _TILES, "Rb": _ROWS, "Kb": _COLUMNS, "R": _ROWS * BLOCK, "K": _COLUMNS * BLOCK}
    sizes |= {"score Q": _QUERY, "score K": _KEY}
    for axes, _ in inputs.values():
        for axis in axes:
            if isinstance(axis, str):
                sizes.setdefault(axis, _FREE + len(sizes))
                dims.setdefault(axis, Dim.DYNAMIC)
    return Program(
        module=module(spec, tuple(inputs)),
        args=tuple(torch.zeros(shape_of(axes, sizes), dtype=dtype) for axes, dtype in inputs.values()),
        dynamic_shapes=tuple(
            {i: dims[axis] for i, axis in enumerate(axes) if isinstance(axis, str)}
            for axes, _ in inputs.values()
        ),
        inputs=tuple(inputs),
        outputs=outputs,
    )
