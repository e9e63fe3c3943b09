"""Scored attention on the CPU, one chunk of query rows after another: memory is bounded by rows x keys.

The programs take float32 and whole blocks of 128 rows and keys (``bounds["rows"]``). Chunks do not depend on
the number of threads, and their sums are taken in order, in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from aotpack.runtime.abi import Library

__all__ = ["Chunked"]

# About how many bytes one float32 tensor of a chunk's scores takes; programs hold a few of them.
SCORE_BYTES: Final = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunked:
    """The two programs of attention on chunks, and the names of their inputs.

    Attributes:
        forward: program.
        backward: program.
        forward_inputs: names, in order.
        backward_inputs: names, in order.
        mask: names of the mask's tensors, in order.
        score: names of the score's tensors, in order.
        rows: what the rows of a chunk and the padded lengths are multiples of.
    """

    forward: Library
    backward: Library
    forward_inputs: Sequence[str]
    backward_inputs: Sequence[str]
    mask: Sequence[str]
    score: Sequence[str]
    rows: int

    def run_forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Sequence[Tensor], score: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """out [B,H,Q,Dv] in q's dtype and lse [B,H,Q] float32."""
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        for rows, given in self._chunks({"q": q}, k, v, mask, score):
            found = self.forward([given[name] for name in self.forward_inputs])
            for whole, part in zip((out, lse), found, strict=True):
                whole[:, :, rows] = part[:, :, : rows.stop - rows.start]
        return out, lse

    def run_backward(
        self,
        by_row: Mapping[str, Tensor],
        k: Tensor,
        v: Tensor,
        mask: Sequence[Tensor],
        score: Sequence[Tensor],
        trained: int,
    ) -> list[Tensor]:
        """dq, dk, dv and the gradients of the first ``trained`` of the score's tensors, in their dtypes.

        Args:
            by_row: ``q``, ``out``, ``lse``, ``grad.out`` and ``grad.lse``.
            k: [B,Hk,KV,D].
            v: [B,Hk,KV,Dv].
            mask: the mask's tensors.
            score: the score's tensors, those that are trained first.
            trained: how many are.
        """
        dq, summed = torch.empty_like(by_row["q"]), [k, v, *score[:trained]]
        sums: list[Tensor] = []
        for rows, given in self._chunks(by_row, k, v, mask, score):
            of_rows, *found = self.backward([given[name] for name in self.backward_inputs])
            dq[:, :, rows] = of_rows[:, :, : rows.stop - rows.start]
            sums = [total.add_(part) for total, part in zip(sums, found, strict=True)] if sums else found
        sums[:2] = [part[:, :, : k.shape[2]] for part in sums[:2]]
        return [dq, *(t.to(of.dtype).contiguous() for t, of in zip(sums, summed, strict=True))]

    def _chunks(
        self,
        by_row: Mapping[str, Tensor],
        k: Tensor,
        v: Tensor,
        mask: Sequence[Tensor],
        score: Sequence[Tensor],
    ) -> Iterator[tuple[slice, dict[str, Tensor]]]:
        batch, heads, query = by_row["q"].shape[:3]
        lists = dict(zip(self.mask, mask, strict=True))
        tiles = lists.pop("mask.tiles")
        fixed = {
            **{name: self._whole(tensor.float()) for name, tensor in (("k", k), ("v", v))},
            # No tile at all is read as one that no block names.
            "mask.tiles": tiles if len(tiles) else tiles.new_zeros((1, *tiles.shape[1:])),
            **dict(zip(self.score, score, strict=True)),
        }
        step = self._step(batch * heads * fixed["k"].shape[2])
        for first in range(0, query, step):
            rows = slice(first, min(first + step, query))
            blocks = slice(first // self.rows, -(-rows.stop // self.rows))
            cut = {name: self._whole(tensor[:, :, rows].float()) for name, tensor in by_row.items()}
            if "lse" in cut:
                cut["lse"][:, :, rows.stop - first :] = -math.inf
            listed = {
                name: tensor[:, :, blocks].expand(batch, *(-1,) * (tensor.dim() - 1)).contiguous()
                for name, tensor in lists.items()
            }
            yield rows, {**fixed, **cut, **listed, "rows": torch.tensor([first, query, k.shape[2]])}

    def _step(self, row: int) -> int:
        """Rows of a chunk whose every row has so many scores, of all batch entries and heads together."""
        return max(1, SCORE_BYTES // (4 * row * self.rows)) * self.rows

    def _whole(self, tensor: Tensor) -> Tensor:
        """[B,H,L] or [B,H,L,X], with zeros up to whole blocks of L; contiguous."""
        missing = -tensor.shape[2] % self.rows
        if not missing:
            return tensor.contiguous()
        return pad(tensor, (0, 0) * (tensor.dim() - 3) + (0, missing))
