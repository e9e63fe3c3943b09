"""The operators ``aotpack::scored_attention`` and its backward: attention with a score's tensors.

As ``operator.py``, whose operators attention without a score keeps to itself.
"""

from __future__ import annotations

import threading
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.runtime.operator import Programs, aligned, below_autograd, enroll, find, not_twice, register
from aotpack.runtime.transforms import in_forward_mode, no_forward_mode

__all__ = ["enroll_scored", "scored_attention", "scored_attention_backward"]

_SCORE: Final = "Tensor[] mask, Tensor[] trained, Tensor[] read"
_SCHEMAS: Final = (
    f"scored_attention(int programs, Tensor q, Tensor k, Tensor v, {_SCORE}) -> (Tensor out, Tensor lse)",
    (
        "scored_attention_backward(int programs, Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, "
        f"Tensor v, Tensor out, Tensor lse, {_SCORE}) -> (Tensor dq, Tensor dk, Tensor dv, Tensor[] dscore)"
    ),
)
_Tensors = list[Tensor]
_Gradients = tuple[Tensor, Tensor, Tensor, _Tensors]

_lock: Final = threading.Lock()
_library: torch.library.Library | None = None


def enroll_scored(programs: Programs) -> int:
    """As ``operator.enroll``, for programs that take a score's tensors."""
    global _library
    key = enroll(programs)
    with _lock:
        if _library is None:
            _library = register("FRAGMENT", _SCHEMAS, _KERNELS)
    return key


def scored_attention(
    key: int, q: Tensor, k: Tensor, v: Tensor, mask: _Tensors, trained: _Tensors, read: _Tensors
) -> tuple[Tensor, Tensor]:
    """Calls the operator: out and lse, differentiable once in q, k, v and the tensors that are trained."""
    operator = torch.ops.aotpack.scored_attention.default
    result: tuple[Tensor, Tensor] = operator(key, q, k, v, mask, trained, read)
    return result


def scored_attention_backward(*args: Any) -> _Gradients:
    """Calls the operator: dq, dk, dv and the gradients of the tensors that are trained."""
    result: _Gradients = torch.ops.aotpack.scored_attention_backward.default(*args)
    return result


def _forward(
    key: int, q: Tensor, k: Tensor, v: Tensor, mask: _Tensors, trained: _Tensors, read: _Tensors
) -> tuple[Tensor, Tensor]:
    score = [aligned(tensor) for tensor in (*trained, *read)]
    return find(key).forward(aligned(q), aligned(k), aligned(v), mask, score)


def _backward(
    key: int,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: _Tensors,
    trained: _Tensors,
    read: _Tensors,
) -> _Gradients:
    grads = (aligned(grad_out), aligned(grad_lse))
    score = [aligned(tensor) for tensor in (*trained, *read)]
    qkv = (aligned(q), aligned(k), aligned(v))
    dq, dk, dv, *dscore = find(key).backward(*grads, *qkv, out, lse, mask, score)
    return dq, dk, dv, dscore


def _forward_fake(key: int, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows = q.shape[:3]
    return q.new_empty((*rows, v.shape[3])), q.new_empty(rows, dtype=torch.float32)


def _backward_fake(key: int, grad_out: Tensor, grad_lse: Tensor, *args: Any) -> _Gradients:
    q, k, v, _, _, _, trained, _ = args
    dq, dk, dv, *dscore = (tensor.new_empty(tensor.shape) for tensor in (q, k, v, *trained))
    return dq, dk, dv, dscore


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: int, counts: tuple[int, int, int], *tensors: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v, *lists = tensors
        with below_autograd():
            out, lse = scored_attention(key, q, k, v, *_split(lists, counts))
        ctx.key, ctx.counts = key, counts
        ctx.save_for_backward(q, k, v, out, lse, *lists)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (*tensors,) = ctx.saved_tensors
        arguments = (ctx.key, *grads, *tensors[:5], *_split(tensors[5:], ctx.counts))
        if torch.is_grad_enabled():  # with create_graph, which is refused once that graph is differentiated
            dq, dk, dv, dscore = scored_attention_backward(*arguments)
        else:
            with below_autograd():
                dq, dk, dv, dscore = scored_attention_backward(*arguments)
        mask, _, read = ctx.counts
        return None, None, dq, dk, dv, *[None] * mask, *dscore, *[None] * read

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode()


class _ScoredBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: int, counts: tuple[int, int, int], *tensors: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            dq, dk, dv, dscore = scored_attention_backward(
                key, *tensors[:7], *_split(list(tensors[7:]), counts)
            )
        return dq, dk, dv, *dscore

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise not_twice()


def _split(tensors: _Tensors, counts: tuple[int, int, int]) -> tuple[_Tensors, _Tensors, _Tensors]:
    mask, trained, _ = counts
    return tensors[:mask], tensors[mask : mask + trained], tensors[mask + trained :]


def _forward_autograd(key: int, q: Tensor, k: Tensor, v: Tensor, *lists: _Tensors) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() and not in_forward_mode():
        with below_autograd():
            return scored_attention(key, q, k, v, *lists)
    mask, trained, read = lists
    counts = (len(mask), len(trained), len(read))
    result: tuple[Tensor, Tensor] = _Scored.apply(key, counts, q, k, v, *mask, *trained, *read)
    return result


def _backward_autograd(key: int, *args: Any) -> _Gradients:
    *tensors, mask, trained, read = args
    counts = (len(mask), len(trained), len(read))
    dq, dk, dv, *dscore = _ScoredBackward.apply(key, counts, *tensors, *mask, *trained, *read)
    return dq, dk, dv, dscore


_KERNELS: Final = (
    (_forward, _forward_fake, _forward_autograd),
    (_backward, _backward_fake, _backward_autograd),
)
