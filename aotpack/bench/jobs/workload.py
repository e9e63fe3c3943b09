"""Inputs of one training step, and the rivals' way to do it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from aotpack.masks import Lengths, dense
from aotpack.package import Package
from aotpack.spec import AttentionSpec

__all__ = ["Workload", "draw", "read_spec", "sdpa"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One step's tensors.

    Attributes:
        spec: what is measured.
        q, k, v: [1,H,N*bs,D], [1,Hk,S+N*bs,D], [1,Hk,S+N*bs,Dv]; all need gradients unless told otherwise.
        grad: of the output.
        anchors, keep: [1,N]; every block is kept.
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
        return Lengths(batch=1, query=self.q.shape[2], key=self.k.shape[2])

    def visible(self) -> Tensor:
        """The dense boolean mask [1,1,Q,KV]."""
        return dense(self.spec.mask, {"anchors": self.anchors, "keep": self.keep}, self.lengths)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        """Backward: dq, dk, dv."""
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad)

    def gradients_of_loss(self, out: Tensor) -> tuple[Tensor, ...]:
        """The same as a trainer has it, from a scalar loss.

        The first gradient that is given to autograd from outside makes torch import sympy, for 0.4 s.
        """
        return torch.autograd.grad((out * self.grad).sum(), (self.q, self.k, self.v))


def read_spec(package: str, name: str) -> AttentionSpec:
    """A spec of a package file."""
    with Package.open(package) as opened:
        return opened.manifest.specs[name]


def draw(
    spec: AttentionSpec, *, context: int, anchors: int, gradients: bool = True, device: str = "cpu"
) -> Workload:
    """Random tensors, the same ones each time on a device."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, spec.dtype)
    rows = anchors * (spec.mask.block_size or 1)

    def normal(heads: int, length: int, size: int) -> Tensor:
        return torch.randn(1, heads, length, size, generator=generator, device=device).to(dtype)

    return Workload(
        spec=spec,
        q=normal(spec.heads, rows, spec.head_dim).requires_grad_(gradients),
        k=normal(spec.kv_heads, context + rows, spec.head_dim).requires_grad_(gradients),
        v=normal(spec.kv_heads, context + rows, spec.value_dim).requires_grad_(gradients),
        grad=normal(spec.heads, rows, spec.value_dim),
        anchors=torch.randint(0, context, (1, anchors), generator=generator, device=device).sort().values,
        keep=torch.ones(1, anchors, dtype=torch.bool, device=device),
        context_len=context,
    )


def sdpa(work: Workload, visible: Tensor) -> Tensor:
    """torch's scaled_dot_product_attention with a dense boolean mask."""
    return functional.scaled_dot_product_attention(
        work.q, work.k, work.v, attn_mask=visible, scale=work.spec.scale, enable_gqa=True
    )
