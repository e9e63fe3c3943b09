"""The ways to make a step's attention, all called alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from aotpack.bench.case import Case
from aotpack.bench.jobs.workload import read_spec
from aotpack.errors import InputError
from aotpack.masks import Lengths, dense, family_of
from aotpack.spec import AttentionSpec

__all__ = ["CompiledFlex", "Dense", "Nothing", "Way", "dense_attention", "way"]


class Way(Protocol):
    """An attention of the family dflash; ``aotpack.Attention`` is one."""

    @property
    def spec(self) -> AttentionSpec:
        """What it computes."""

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> Any:
        """The mask of one step: anchors int64 [B,N], keep bool [B,N]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q [B,H,N*bs,D], k and v [B,Hk,S+N*bs,D]; returns [B,H,N*bs,D]."""


def way(who: str, case: Case) -> Way:
    """By its name in ``aotpack.bench.rivals.NAMES``."""
    if who == "aotpack":
        from aotpack.runtime import load

        return load(case.package, case.device).attention(case.spec)
    spec = read_spec(case)
    ways: dict[str, Callable[[], Way]] = {
        "flex": lambda: CompiledFlex(spec, dynamic=False),
        "flex-dynamic": lambda: CompiledFlex(spec, dynamic=True),
        "flex-autotune": lambda: CompiledFlex(spec, dynamic=False, mode="max-autotune-no-cudagraphs"),
        "flex-masked": lambda: CompiledFlex(spec, compiled_mask=True),
        "sdpa": lambda: Dense(spec, _sdpa),
        "compiled-dense": lambda: Dense(spec, torch.compile(dense_attention)),
        "nothing": lambda: Nothing(spec),
    }
    if who not in ways:
        raise InputError("the way is unknown", expected=", ".join(ways), found=who)
    return ways[who]()


class CompiledFlex:
    """torch.compile(flex_attention).

    Args:
        spec: what it computes.
        dynamic, mode: of torch.compile.
        compiled_mask: whether create_block_mask is compiled too.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        dynamic: bool | None = None,
        mode: str | None = None,
        compiled_mask: bool = False,
    ) -> None:
        # Imported here because torch 2.11 imports dynamo with it.
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.spec = spec
        self._create: Callable[..., Any] = (
            torch.compile(create_block_mask) if compiled_mask else create_block_mask
        )
        self._flex: Callable[..., Any] = torch.compile(flex_attention, dynamic=dynamic, mode=mode)

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> Any:
        """torch's ``BlockMask``, from a rule that reads this step's anchors as a trainer's does."""
        lengths = _lengths(self.spec, anchors, context_len)
        rule = family_of(self.spec.mask).rule(self.spec.mask, {"anchors": anchors, "keep": keep}, lengths)

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return rule(b, q, kv)

        device = str(anchors.device)
        return self._create(visible, lengths.batch, None, lengths.query, lengths.key, device=device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        out: Tensor = self._flex(q, k, v, block_mask=mask, scale=self.spec.scale, enable_gqa=True)
        return out


class Dense:
    """A function of q, k, v, the dense boolean mask [B,1,Q,KV] and the scale."""

    def __init__(self, spec: AttentionSpec, function: Callable[..., Tensor]) -> None:
        self.spec = spec
        self._function = function

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> Tensor:
        """The dense boolean mask."""
        lengths = _lengths(self.spec, anchors, context_len)
        return dense(self.spec.mask, {"anchors": anchors, "keep": keep}, lengths)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self._function(q, k, v, mask, self.spec.scale)


class Nothing:
    """What autograd itself takes of a call in Python: nothing is computed, allocated or launched."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> None:
        """None."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        result: Tensor = _Nothing.apply(q, k, v)
        return result


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v = ctx.saved_tensors
        return q.detach(), k.detach(), v.detach()


def _lengths(spec: AttentionSpec, anchors: Tensor, context_len: int) -> Lengths:
    batch, count = anchors.shape
    query = count * (spec.mask.block_size or 1)
    return Lengths(batch=batch, query=query, key=context_len + query)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    if q.device.type == "cuda":
        # With enable_gqa and a mask, torch has only plain math on CUDA, with the scores of all heads at once.
        k, v = _repeated(q, k, v)
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def dense_attention(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float) -> Tensor:
    """Attention in plain tensor operations, with an exact softmax in float32."""
    k, v = _repeated(q, k, v)
    scores = (q @ k.mT * scale).masked_fill(~visible, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v


def _repeated(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    return k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
