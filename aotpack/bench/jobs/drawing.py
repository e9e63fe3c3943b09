"""Random steps of any named mask, and the dense fp64 math of one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.dense import dense_attention, relative_error
from aotpack.errors import InputError
from aotpack.masks import Family, Input, Lengths, family_of
from aotpack.runtime.arguments import LENGTH_ARGUMENTS
from aotpack.spec import AttentionSpec
from aotpack.spec.tensors import shape_of

__all__ = ["RESULTS", "Step", "dense_results", "draw_step", "relative_errors"]

RESULTS: Final = ("out", "lse", "grad.q", "grad.k", "grad.v")
# Of scores that are in memory at once, for one key head and entry.
_CELLS: Final = 1 << 23


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One call's tensors.

    Attributes:
        spec: what is computed.
        q, k, v: [B,H,Q,D], [B,Hk,K,D], [B,Hk,K,Dv]; all need gradients.
        grad, grad_lse: of out [B,H,Q,Dv], and of the log-sum-exp, float32 [B,H,Q].
        mask: arguments of ``block_mask``: the family's tensors, and the lengths that they do not say.
    """

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    grad_lse: Tensor
    mask: dict[str, Any]


def draw_step(spec: AttentionSpec, batch: int, query: int, key: int, device: str) -> Step:
    """The same tensors each time on a device.

    Raises:
        InputError: the mask is not one whose tensors can be drawn.
    """
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, spec.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    family = family_of(spec.mask)
    context = key - query if family.drafts else key
    sizes = {"B": batch, "Q": query, "K": key, "N": query // spec.mask.draft_size, "T": context, "S": key}
    return Step(
        spec=spec,
        q=normal(batch, spec.heads, query, spec.head_dim).to(dtype).requires_grad_(),
        k=normal(batch, spec.kv_heads, key, spec.head_dim).to(dtype).requires_grad_(),
        v=normal(batch, spec.kv_heads, key, spec.value_dim).to(dtype).requires_grad_(),
        grad=normal(batch, spec.heads, query, spec.value_dim).to(dtype),
        grad_lse=normal(batch, spec.heads, query),
        mask=_inputs(family, sizes, generator)
        | {LENGTH_ARGUMENTS[axis]: sizes[axis] for axis in family.carried},
    )


def dense_results(step: Step) -> dict[str, Tensor]:
    """The results by name, in float64; one key head and some rows at a time."""
    spec, (batch, _, query, _), key = step.spec, step.q.shape, step.k.shape[2]
    exact = {
        name: torch.zeros(t.shape, dtype=torch.float64, device=t.device)
        for name, t in zip(RESULTS, (step.grad, step.grad_lse, step.q, step.k, step.v), strict=True)
    }
    rule = family_of(spec.mask).rule(spec.mask, step.mask, Lengths(batch=batch, query=query, key=key))
    columns, group = torch.arange(key, device=step.q.device), spec.group_size
    for b, head in ((b, head) for b in range(batch) for head in range(spec.kv_heads)):
        entry = torch.tensor(b, device=step.q.device)
        heads = slice(head * group, (head + 1) * group)
        for rows in torch.arange(query, device=step.q.device).split(max(1, _CELLS // (key * group))):
            visible = rule(entry, rows[:, None], columns).expand(len(rows), key)
            part = (b, heads, slice(int(rows[0]), int(rows[-1]) + 1))
            q, k, v = (
                t.detach().double()[None].requires_grad_()
                for t in (step.q[part], step.k[b, head : head + 1], step.v[b, head : head + 1])
            )
            out, lse = dense_attention(q, k, v, visible, spec.scale)
            grads = torch.autograd.grad(
                [out, lse], [q, k, v], [step.grad[part].double()[None], step.grad_lse[part].double()[None]]
            )
            exact["out"][part], exact["lse"][part] = out.detach()[0], lse.detach()[0]
            exact["grad.q"][part] = grads[0][0]
            exact["grad.k"][b, head] += grads[1][0, 0]
            exact["grad.v"][b, head] += grads[2][0, 0]
    return exact


def relative_errors(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """``||found - exact|| / ||exact||`` of each result; infinite where values are not finite alike."""
    errors = {name: relative_error(found[name].double(), exact[name].double()) for name in exact}
    return {name: math.inf if math.isnan(error) else error for name, error in errors.items()}


def _inputs(family: Family, sizes: dict[str, int], generator: torch.Generator) -> dict[str, Any]:
    device = generator.device

    def whole(high: int, shape: list[int]) -> Tensor:
        return torch.randint(0, high, shape, generator=generator, device=device)

    def drawn(given: Input) -> Tensor:
        shape = shape_of(given.dims, sizes, sizes["T"])
        last = torch.arange(shape[-1], device=device).expand(shape)
        known = {
            # Ascending, as trainers sample them.
            "anchors": lambda: whole(sizes["T"], shape).sort(-1).values,
            # The last block is dropped, so that empty rows are part of it.
            "keep": lambda: last < shape[-1] - 1,
            "document_ids": lambda: whole(3, shape).sort(-1).values,
            "lengths": lambda: torch.full(shape, sizes["Q"] - sizes["Q"] // 8, device=device),
            "anchor_pos": lambda: whole(sizes["T"], shape),
            "depth": lambda: whole(4, shape),
            "prefix": lambda: torch.full(shape, sizes["Q"] // 4, device=device),
            "start": lambda: whole(64, shape),
            "real": lambda: last < shape[-1] - shape[-1] // 8,
        }
        if given.name not in known:
            raise InputError(
                f"no values can be drawn for the mask's {given.name}", expected=", ".join(sorted(known))
            )
        return known[given.name]().to(given.dtype).contiguous()

    return {given.name: drawn(given) for given in family.inputs}
