"""Load a package and call what is in it: no trace, no compile, no compiler process."""

from aotpack.runtime.attention import Attention
from aotpack.runtime.loading import Pack, load
from aotpack.runtime.mask import BlockMask

__all__ = ["Attention", "BlockMask", "Pack", "load"]
