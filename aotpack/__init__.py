"""Compile a drafter's attention once per device type; train with it anywhere, without a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotpack.errors import AotpackError
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import Target

if TYPE_CHECKING:
    from aotpack.runtime import Attention, BlockMask, Pack, load, no_tracing

__all__ = [
    "AotpackError",
    "Attention",
    "AttentionSpec",
    "BlockMask",
    "MaskSpec",
    "Pack",
    "Target",
    "load",
    "no_tracing",
]

__version__ = "0.1.0"

_RUNTIME = ("Attention", "BlockMask", "Pack", "load", "no_tracing")


def __getattr__(name: str) -> Any:
    # The runtime imports torch; inspecting and verifying a package works without it.
    if name in _RUNTIME:
        import aotpack.runtime

        return getattr(aotpack.runtime, name)
    raise AttributeError(f"module 'aotpack' has no attribute {name!r}")
