"""Flex attention's kernels without boundary checks in blocks that are visible as a whole.

Torch's templates check every cell of every block against the ends of both axes where a length is no multiple
of the tiles. A block that our block-mask programs call full lies inside both axes, so the checks stay where
they are needed: in partial blocks. The only module that touches ``torch._inductor.kernel.flex``; the edits
were made for torch 2.14.1, and a template that lacks the text they replace is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from aotpack.errors import HostError

__all__ = ["edited", "sizes_in_score_graphs", "unchecked_full_blocks"]

_CHECK: Final = r"\bIS_DIVISIBLE\b(?! acts)"  # all but one that is in a comment
_UNLESS_FULL: Final = "(IS_DIVISIBLE or IS_FULL_BLOCKS)"
# Of each template: the functions that see one block, and how many checks they have.
_EDITS: Final[Mapping[str, tuple[tuple[str, int], ...]]] = {
    "flex_attention": (("forward_block_mn", 2), ("forward_inner", 1)),
    "flex_attention_backward": (("bwd_dq_block_mn", 6), ("bwd_dkdv_block_mn", 8)),
}


@contextlib.contextmanager
def unchecked_full_blocks() -> Iterator[None]:
    """Inside, Inductor generates flex attention from the edited templates.

    Raises:
        HostError: this torch has other templates.
    """
    from torch._inductor.kernel.flex import common, flex_attention

    load = common.load_flex_template
    sources = {
        "flex_attention": ("flex_attention", "utilities", "common"),
        "flex_attention_backward": ("flex_backwards", "utilities"),
    }
    templates: dict[str, Any] = {
        "flex_attention": flex_attention.flex_attention_template,
        "flex_attention_backward": flex_attention.flex_attention_backward_template,
    }
    found = {name: template.template for name, template in templates.items()}
    made = {name: edited(name, "".join(load(part) for part in parts)) for name, parts in sources.items()}
    try:
        for name, template in templates.items():
            template.template = template._template_from_string(made[name])
        yield
    finally:
        for name, template in templates.items():
            template.template = found[name]


@contextlib.contextmanager
def sizes_in_score_graphs() -> Iterator[None]:
    """Inside, a score's gradient may have dynamic axes.

    Torch takes a size inside a score's graph for one of the results of attention itself, and fails.
    """
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    target = torch.ops.aten.sym_size.int
    found = lowerings[target]

    def size(tensor: Any, axis: int) -> Any:
        return found(tensor, axis) if V.graph.current_node.target is target else tensor.get_size()[axis]

    lowerings[target] = size
    try:
        yield
    finally:
        lowerings[target] = found


def edited(name: str, source: str) -> str:
    """A template's source, ``"flex_attention"`` or ``"flex_attention_backward"``, without those checks.

    Raises:
        HostError: the source has not the checks that are taken out.
    """
    for function, checks in _EDITS[name]:
        source = _in_function(source, function, _CHECK, _UNLESS_FULL, checks)
    # Cells past an end are hidden whatever index the rule is asked with, and a remainder takes long.
    return _in_function(
        source, "get_bounded_indices", r"indices % max_len", "tl.minimum(indices, max_len - 1)", 1
    )


def _in_function(source: str, function: str, pattern: str, replacement: str, expected: int) -> str:
    start = source.find(f"def {function}(")
    end = source.find("@triton.jit", start)
    end = len(source) if end < 0 else end
    body, count = re.subn(pattern, replacement, source[start:end])
    if start < 0 or count != expected:
        raise HostError(
            "flex attention's kernels differ from those that aotpack was made for",
            expected=f"{expected} times {pattern!r} in {function}",
            found=count if start >= 0 else "no such function",
            remedy="build with torch 2.14.1",
        )
    return source[:start] + body + source[end:]
