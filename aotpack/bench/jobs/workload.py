"""Inputs of one training step, and how much of the grid its mask shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.bench.case import Case
from aotpack.masks import Lengths, family_of
from aotpack.package import Package
from aotpack.spec import AttentionSpec

__all__ = ["Workload", "draw", "draw_anchors", "read_spec"]

_BLOCK: Final = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step's tensors.

    Attributes:
        spec: what is measured.
        q, k, v: [B,H,N*bs,D], [B,Hk,S+N*bs,D], [B,Hk,S+N*bs,Dv]; all need gradients unless told otherwise.
        grad: of the output.
        anchors, keep: [B,N]; every block is kept.
        context_len: S.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    anchors: Tensor
    keep: Tensor
    context_len: int

    @property
    def lengths(self) -> Lengths:
        """Sizes of the mask's axes."""
        return Lengths(batch=self.q.shape[0], query=self.q.shape[2], key=self.k.shape[2])

    @property
    def mask(self) -> dict[str, Any]:
        """What a block mask is made of."""
        return {"anchors": self.anchors, "keep": self.keep, "context_len": self.context_len}

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        """Backward: dq, dk, dv."""
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)

    def gradients_of_loss(self, out: Tensor) -> tuple[Tensor, ...]:
        """The same as a trainer has it, from a scalar loss.

        The first gradient that is given to autograd from outside makes torch import sympy, for 0.4 s.
        """
        return torch.autograd.grad((out * self.grad).sum(), (self.q, self.k, self.v))

    def visible(self) -> dict[str, int]:
        """``cells`` that the mask shows, and 128x128 ``blocks`` with such a cell, of all heads together."""
        cells = blocks = 0
        for rows in self._visible_rows():
            cells += int(rows.sum())
            pad = -rows.shape[1] % _BLOCK
            columns = torch.nn.functional.pad(rows.any(dim=0), (0, pad))
            blocks += int(columns.view(-1, _BLOCK).any(dim=1).sum())
        return {"cells": cells * self.spec.heads, "blocks": blocks * self.spec.heads}

    def _visible_rows(self) -> Iterator[Tensor]:
        """bool [up to 128, KV], one block row after the other: the whole grid may not fit into memory."""
        lengths, device = self.lengths, self.q.device
        inputs = {"anchors": self.anchors, "keep": self.keep}
        rule = family_of(self.spec.mask).rule(self.spec.mask, inputs, lengths)
        kv = torch.arange(lengths.key, device=device)
        for entry in range(lengths.batch):
            b = torch.tensor(entry, device=device)
            for rows in torch.arange(lengths.query, device=device).split(_BLOCK):
                yield rule(b, rows[:, None], kv).expand(len(rows), lengths.key)


def read_spec(case: Case) -> AttentionSpec:
    """The spec of a case."""
    with Package.open(case.package) as opened:
        return opened.manifest.specs[case.spec]


def draw(case: Case, *, gradients: bool = True) -> Workload:
    """Random tensors, the same ones each time on a device."""
    spec = read_spec(case)
    generator = torch.Generator(case.device).manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    rows = case.anchors * (spec.mask.block_size or 1)

    def normal(heads: int, length: int, size: int) -> Tensor:
        shape = (case.batch, heads, length, size)
        return torch.randn(shape, generator=generator, device=case.device).to(dtype)

    anchors, keep = draw_anchors(case, generator)
    return Workload(
        spec=spec,
        q=normal(spec.heads, rows, spec.head_dim).requires_grad_(gradients),
        k=normal(spec.kv_heads, case.context + rows, spec.head_dim).requires_grad_(gradients),
        v=normal(spec.kv_heads, case.context + rows, spec.value_dim).requires_grad_(gradients),
        grad=normal(spec.heads, rows, spec.value_dim),
        anchors=anchors,
        keep=keep,
        context_len=case.context,
    )


def draw_anchors(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """anchors int64 and keep bool, [B,N]: random places in the context in ascending order, all kept."""
    shape = (case.batch, case.anchors)
    anchors = torch.randint(0, case.context, shape, generator=generator, device=case.device)
    return anchors.sort(-1).values, torch.ones(shape, dtype=torch.bool, device=case.device)
