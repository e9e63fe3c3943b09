"""Compile a drafter's attention once per device type; train with it anywhere, without a compiler."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aotpack.errors import AotpackError
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec, TensorInput
from aotpack.targets import Target

if TYPE_CHECKING:
    from aotpack.own import inputs
    from aotpack.recording import capture
    from aotpack.runtime import Attention, BlockMask, Pack, load, no_tracing

__all__ = [
    "AotpackError",
    "Attention",
    "AttentionSpec",
    "BlockMask",
    "MaskSpec",
    "Pack",
    "ScoreSpec",
    "Target",
    "TensorInput",
    "capture",
    "inputs",
    "load",
    "no_tracing",
]

__version__ = "0.1.0"

# Imported when first used: they import torch, and inspecting and verifying a package works without it.
_LAZY = {
    "Attention": "aotpack.runtime",
    "BlockMask": "aotpack.runtime",
    "Pack": "aotpack.runtime",
    "capture": "aotpack.recording",
    "inputs": "aotpack.own",
    "load": "aotpack.runtime",
    "no_tracing": "aotpack.runtime",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'aotpack' has no attribute {name!r}")
