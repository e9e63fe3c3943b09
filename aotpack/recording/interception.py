"""Takes the place of torch's flex_attention while a model is recorded, wherever it was imported to.

The function's code object is exchanged, so every reference to the function runs the stub: an import by name,
a wrapper of a library, a compiled one. ``torch.compile`` is told to run eagerly meanwhile. This module alone
knows torch's signature of flex_attention (tried with torch 2.11.0 and 2.14.1) and touches what is torch's.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.nn.attention.flex_attention as torch_flex

from aotpack.errors import HostError, UnsupportedError

__all__ = ["answer", "intercepted", "with_statistics"]

_running: Final = threading.Lock()
_answers: Final[list[Callable[..., Any]]] = []


def _stub(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Any = None,
    block_mask: Any = None,
    scale: Any = None,
    enable_gqa: Any = False,
    return_lse: Any = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    # This code runs with the globals of torch's module, so all that it needs is imported here.
    from aotpack.recording.interception import answer

    return answer(
        query=query,
        key=key,
        value=value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        enable_gqa=enable_gqa,
        return_lse=return_lse,
        kernel_options=kernel_options,
        return_aux=return_aux,
    )


def answer(**arguments: Any) -> Any:
    """What flex_attention returns while a capture runs."""
    return _answers[-1](**arguments)


@contextmanager
def intercepted(function: Callable[..., Any]) -> Iterator[None]:
    """Has ``function`` answer each call of flex_attention, which gets the arguments by keyword.

    Raises:
        UnsupportedError: a capture is running.
        HostError: this torch's flex_attention has another signature.
    """
    flex = torch_flex.flex_attention
    if not _running.acquire(blocking=False):
        raise UnsupportedError(
            "a capture is running already", remedy="capture one model at a time, and no model inside another"
        )
    try:
        _check_signature(flex)
        code = flex.__code__
        _answers.append(function)
        flex.__code__ = _stub.__code__
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            flex.__code__ = code
            _answers.clear()
    finally:
        _running.release()


def with_statistics(out: Any, lse: Any, return_lse: bool, return_aux: Any) -> Any:
    """The outputs in the form that the caller of flex_attention asked for."""
    if return_aux is not None:
        return out, torch_flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)
    return (out, lse) if return_lse else out


def _check_signature(flex: Any) -> None:
    def shape(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    if not inspect.isfunction(flex) or flex.__code__.co_freevars or shape(flex) != shape(_stub):
        raise HostError(
            "this torch has another flex_attention than those that can be recorded",
            expected=str(inspect.signature(_stub)),
            found=f"torch {torch.__version__}: {inspect.signature(flex)}",
            remedy="use torch 2.11 to 2.14, or write the spec by hand",
        )
