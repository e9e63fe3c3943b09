"""What attention does not do: transforms of ``torch.func``, and derivatives in forward mode.

The only module that names the dispatch key ``FuncTorchDynamicLayerFrontMode``, which is on inside every
transform of ``torch.func``, and that reads ``torch.autograd.forward_ad._current_level``; tried with torch
2.11.0 and 2.14.1.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from torch.autograd import forward_ad

from aotpack.errors import UnsupportedError

__all__ = ["TRANSFORMS", "in_forward_mode", "no_forward_mode", "no_transforms"]

# A kernel for this key is called first inside vmap, grad, vjp, jvp, jacrev, hessian and functionalize.
TRANSFORMS: Final = "FuncTorchDynamicLayerFrontMode"


def no_transforms(*args: Any) -> NoReturn:
    """The kernel of an operator inside a transform of ``torch.func``."""
    raise UnsupportedError(
        "aotpack's attention was called inside a transform of torch.func",
        expected="a call outside vmap, grad, vjp, jvp, jacrev, jacfwd, hessian and functionalize",
        found="vmap, grad, jvp or another transform around it",
        remedy="use the batch axis in place of vmap, and torch.autograd.grad in place of torch.func.grad",
    )


def no_forward_mode() -> UnsupportedError:
    """The error of a derivative in forward mode."""
    return UnsupportedError(
        "aotpack's attention has no derivative in forward mode",
        expected="inputs without tangents",
        found="an input of torch.autograd.forward_ad that has one",
        remedy="use loss.backward() or torch.autograd.grad",
    )


def in_forward_mode() -> bool:
    """Whether a level of ``torch.autograd.forward_ad`` is entered, so that tensors may have tangents."""
    return forward_ad._current_level >= 0
