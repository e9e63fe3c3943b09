"""The registered torch operators ``aotpack::attention`` and ``aotpack::attention_backward``.

To autograd, to torch.compile around them and to checkpointing each is one opaque call. They are
registered on first use, with ``torch.library.Library``: ``torch.library.custom_op`` would import
``torch._dynamo`` (torch 2.11 to 2.14). The only module that touches ``torch._C._AutoDispatchBelowAutograd``;
tried with torch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from aotpack.errors import InputError, UnsupportedError
from aotpack.runtime.transforms import TRANSFORMS, in_forward_mode, no_forward_mode, no_transforms

__all__ = [
    "Programs",
    "aligned",
    "attention",
    "attention_backward",
    "below_autograd",
    "enroll",
    "find",
    "not_twice",
    "register",
]

_SCHEMAS: Final = (
    "attention(int programs, Tensor q, Tensor k, Tensor v, Tensor[] mask) -> (Tensor out, Tensor lse)",
    (
        "attention_backward(int programs, Tensor grad_out, Tensor grad_lse, Tensor q, Tensor k, Tensor v, "
        "Tensor out, Tensor lse, Tensor[] mask) -> (Tensor dq, Tensor dk, Tensor dv)"
    ),
)
_ALIGNMENT: Final = 16


class Programs(Protocol):
    """The compiled forward and backward of one variant, called below autograd."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor], score: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor]:
        """out [B,H,Q,Dv] and lse [B,H,Q]."""

    def backward(
        self,
        grad_out: Tensor,
        grad_lse: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        mask: list[Tensor],
        score: Sequence[Tensor] = (),
    ) -> Sequence[Tensor]:
        """dq, dk and dv, shaped as q, k and v, and the gradients of a score's trained tensors."""


# Inside it a call of an operator goes past autograd.
below_autograd: Final = torch._C._AutoDispatchBelowAutograd
_lock: Final = threading.Lock()
_enrolled: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
_library: torch.library.Library | None = None
_next_key = 0


def enroll(programs: Programs) -> int:
    """Gives programs a key by which the operators find them, for as long as they live."""
    global _library, _next_key
    with _lock:
        if _library is None:
            _library = register("DEF", _SCHEMAS, _KERNELS)
        _next_key += 1
        _enrolled[_next_key] = programs
        return _next_key


def attention(key: int, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Calls the operator: out and lse, differentiable once in q, k and v."""
    result: tuple[Tensor, Tensor] = torch.ops.aotpack.attention.default(key, q, k, v, mask)
    return result


def attention_backward(key: int, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Calls the operator: dq, dk and dv from the gradients of out and lse, q, k, v, out, lse and the mask."""
    result: tuple[Tensor, Tensor, Tensor] = torch.ops.aotpack.attention_backward.default(key, *arguments)
    return result


def find(key: int) -> Programs:
    """The enrolled programs of that key; ``InputError`` where they are gone."""
    programs = _enrolled.get(key)
    if programs is None:
        raise InputError(
            "the package of this attention call is no longer loaded",
            expected="an attention whose pack is alive in this process",
            remedy="load the package in this process and keep the pack or the attention",
        )
    found: Programs = programs
    return found


def not_twice() -> UnsupportedError:
    """The error of a second derivative."""
    return UnsupportedError(
        "aotpack's attention cannot be differentiated twice",
        expected="one backward through each forward",
        found="a gradient of a gradient of attention",
        remedy="take second derivatives without attention in their path, or with dense attention",
    )


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, and where kernels can read 16 bytes at once: a slice may begin elsewhere."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()


def _forward(key: int, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor]) -> tuple[Tensor, Tensor]:
    return find(key).forward(aligned(q), aligned(k), aligned(v), mask)


def _backward(
    key: int,
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    grads = (aligned(grad_out), aligned(grad_lse))
    dq, dk, dv = find(key).backward(*grads, aligned(q), aligned(k), aligned(v), out, lse, mask)
    return dq, dk, dv


def _forward_fake(key: int, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor]) -> tuple[Tensor, Tensor]:
    batch, heads, rows, _ = q.shape
    return q.new_empty((batch, heads, rows, v.shape[3])), q.new_empty(
        (batch, heads, rows), dtype=torch.float32
    )


def _backward_fake(
    key: int, grad_out: Tensor, grad_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: int, q: Tensor, k: Tensor, v: Tensor, *mask: Tensor) -> tuple[Tensor, Tensor]:
        with below_autograd():
            out, lse = attention(key, q, k, v, list(mask))
        ctx.key = key
        ctx.save_for_backward(q, k, v, out, lse, *mask)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *mask = ctx.saved_tensors
        tensors = (*grads, q, k, v, out, lse)
        if torch.is_grad_enabled():  # with create_graph, which is refused once that graph is differentiated
            found = attention_backward(ctx.key, *tensors, mask)
        else:
            with below_autograd():
                found = attention_backward(ctx.key, *tensors, mask)
        return None, *found, *(None for _ in mask)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise no_forward_mode()


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: int, mask: list[Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
        with below_autograd():
            return attention_backward(key, *tensors, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise not_twice()


def _forward_autograd(key: int, q: Tensor, k: Tensor, v: Tensor, mask: list[Tensor]) -> tuple[Tensor, Tensor]:
    if not torch.is_grad_enabled() and not in_forward_mode():
        with below_autograd():
            return attention(key, q, k, v, mask)
    result: tuple[Tensor, Tensor] = _Attention.apply(key, q, k, v, *mask)
    return result


def _backward_autograd(key: int, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    *tensors, mask = args
    result: tuple[Tensor, Tensor, Tensor] = _AttentionBackward.apply(key, mask, *tensors)
    return result


# Of each operator: what runs it, its fake and its autograd kernel.
_KERNELS: Final = (
    (_forward, _forward_fake, _forward_autograd),
    (_backward, _backward_fake, _backward_autograd),
)


def register(
    kind: str, schemas: Sequence[str], kernels: Sequence[tuple[Any, Any, Any]]
) -> torch.library.Library:
    """Defines operators of the namespace ``aotpack``; they live as long as the library.

    Args:
        kind: ``"DEF"`` for the namespace's first operators, then ``"FRAGMENT"``.
        schemas: one for each operator.
        kernels: what runs it, its fake and its autograd kernel.
    """
    library = torch.library.Library("aotpack", kind)
    for schema, (kernel, fake, autograd) in zip(schemas, kernels, strict=True):
        library.define(schema)
        name = schema.partition("(")[0]
        library.impl(name, kernel, "CPU")
        library.impl(name, kernel, "CUDA")
        library.impl(name, fake, "Meta")
        library.impl(name, autograd, "Autograd")
        library.impl(name, no_transforms, TRANSFORMS)
    return library
