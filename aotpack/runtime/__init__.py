"""Load a package and call what is in it: no trace, no compile, no compiler process."""

from aotpack.runtime.attention import Attention
from aotpack.runtime.loading import load
from aotpack.runtime.mask import BlockMask
from aotpack.runtime.pack import Pack
from aotpack.runtime.tracing import no_tracing

__all__ = ["Attention", "BlockMask", "Pack", "load", "no_tracing"]
