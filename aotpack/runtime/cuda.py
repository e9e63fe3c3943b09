"""What each call of a CUDA program asks of torch.cuda, without what torch's public functions add to it.

The only module that touches ``torch.cuda._DeviceGuard`` and ``torch._C._cuda_getCurrentRawStream``; tried
with torch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = ["current_stream", "on_device"]


def on_device(index: int) -> AbstractContextManager[Any]:
    """Inside, ``index`` is the current device and the driver knows it in this thread."""
    guard: AbstractContextManager[Any] = torch.cuda._DeviceGuard(index)
    return guard


def current_stream(index: int) -> int:
    """The handle of the caller's current stream on a device.

    Kernels are launched by the driver, which knows a thread's device only once the CUDA runtime was asked
    something there; a thread of autograd may come here first.
    """
    torch.cuda.is_current_stream_capturing()
    stream: int = torch._C._cuda_getCurrentRawStream(index)
    return stream
