"""Compile a drafter's attention once per device type; train with it anywhere, without a compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aotpack.errors import AotpackError
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import Target

if TYPE_CHECKING:
    from aotpack.recording import capture
    from aotpack.runtime import Attention, BlockMask, Pack, load

__all__ = [
    "AotpackError",
    "Attention",
    "AttentionSpec",
    "BlockMask",
    "MaskSpec",
    "Pack",
    "Target",
    "capture",
    "load",
]

__version__ = "0.1.0"

_RUNTIME = ("Attention", "BlockMask", "Pack", "load")


def __getattr__(name: str) -> Any:
    # The runtime imports torch; inspecting and verifying a package works without it.
    if name in _RUNTIME:
        import aotpack.runtime

        return getattr(aotpack.runtime, name)
    if name == "capture":
        import aotpack.recording

        return aotpack.recording.capture
    raise AttributeError(f"module 'aotpack' has no attribute {name!r}")
