"""Attention without the dispatcher, where nobody listens there: a call of the operator costs twice as much.

The only module that touches ``torch._C._len_torch_dispatch_stack``, ``_len_torch_function_stack``,
``_get_tracing_state``, ``_autograd._profiler_enabled`` and ``_functorch.peek_interpreter_stack``; tried with
torch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from aotpack.runtime.operator import Programs, aligned, attention_backward
from aotpack.runtime.scored_operator import scored_attention_backward
from aotpack.runtime.transforms import in_forward_mode, no_forward_mode

__all__ = ["attend", "is_plain"]

_PLAIN: Final = frozenset({Tensor, Parameter})
_dispatch_modes: Final = torch._C._len_torch_dispatch_stack
_function_modes: Final = torch._C._len_torch_function_stack
_transform: Final = torch._C._functorch.peek_interpreter_stack
_jit: Final = torch._C._get_tracing_state
_profiler: Final = torch._C._autograd._profiler_enabled


def is_plain(q: Tensor, k: Tensor, v: Tensor, score: Iterable[Tensor] = ()) -> bool:
    """Whether nothing would see the operator: subclass, mode, transform, compiler, profiler, tangents."""
    return (
        not torch.compiler.is_compiling()
        and type(q) in _PLAIN
        and type(k) in _PLAIN
        and type(v) in _PLAIN
        and not _dispatch_modes()
        and not _function_modes()
        and _transform() is None
        and _jit() is None
        and not _profiler()
        and not in_forward_mode()
        and _PLAIN.issuperset(map(type, score))
    )


def attend(
    key: int,
    programs: Programs,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: list[Tensor],
    score: Sequence[Tensor] = (),
    trained: int = 0,
) -> tuple[Tensor, Tensor]:
    """out and lse of enrolled programs, differentiable once; all tensors are plain.

    Args:
        key: of the programs.
        programs: forward and backward.
        q, k, v, mask: as the operator's.
        score: tensors of a score modification, the trained ones first.
        trained: how many of these get a gradient.
    """
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or any(s.requires_grad for s in score[:trained])
    ):
        result: tuple[Tensor, Tensor] = _Attention.apply(key, programs, mask, trained, q, k, v, *score)
        return result
    return programs.forward(aligned(q), aligned(k), aligned(v), mask, [aligned(s) for s in score])


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        key: int,
        programs: Programs,
        mask: list[Tensor],
        trained: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *score: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, lse = programs.forward(aligned(q), aligned(k), aligned(v), mask, [aligned(s) for s in score])
        ctx.save_for_backward(q, k, v, out, lse, *score)
        ctx.key, ctx.programs, ctx.mask, ctx.trained = key, programs, mask, trained
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *score = ctx.saved_tensors
        # With create_graph a second derivative may be asked for, which the operator refuses.
        if torch.is_grad_enabled() or not is_plain(q, k, v, score):
            found = _by_operator(ctx, (*grads, q, k, v, out, lse), score)
        else:
            tensors = aligned(grads[0]), aligned(grads[1]), aligned(q), aligned(k), aligned(v), out, lse
            found = ctx.programs.backward(*tensors, ctx.mask, [aligned(s) for s in score])
        return None, None, None, None, *found, *[None] * (len(score) - ctx.trained)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode()


def _by_operator(ctx: Any, tensors: tuple[Tensor, ...], score: list[Tensor]) -> Sequence[Tensor]:
    if not score:
        return attention_backward(ctx.key, *tensors, ctx.mask)
    trained, read = score[: ctx.trained], score[ctx.trained :]
    dq, dk, dv, dscore = scored_attention_backward(ctx.key, *tensors, ctx.mask, trained, read)
    return dq, dk, dv, *dscore
