"""Flex attention's templates with fewer checks: the text of the torch that builds, and undone afterwards."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.kernel.flex import flex_attention
from torch._inductor.kernel.flex.common import load_flex_template

from aotpack.build import absent
from aotpack.build.templates import edited, unchecked_full_blocks
from aotpack.errors import HostError

SOURCES = {
    "flex_attention": ("flex_attention", "utilities", "common"),
    "flex_attention_backward": ("flex_backwards", "utilities"),
}

needs_its_torch = pytest.mark.skipif(
    torch.__version__.partition("+")[0] not in absent.TRIED,
    reason="building for CUDA needs torch 2.14.1, which has these templates",
)


def source(name: str) -> str:
    return "".join(load_flex_template(part) for part in SOURCES[name])


@needs_its_torch
@pytest.mark.parametrize(("name", "checks"), [("flex_attention", 3), ("flex_attention_backward", 14)])
def test_only_the_checks_of_full_blocks_go(name: str, checks: int) -> None:
    before, after = source(name), edited(name, source(name))
    assert after.count("(IS_DIVISIBLE or IS_FULL_BLOCKS)") == checks
    undone = after.replace("(IS_DIVISIBLE or IS_FULL_BLOCKS)", "IS_DIVISIBLE")
    assert undone.replace("tl.minimum(indices, max_len - 1)", "indices % max_len") == before


@needs_its_torch
def test_afterwards_torch_has_its_own_templates() -> None:
    templates = (flex_attention.flex_attention_template, flex_attention.flex_attention_backward_template)
    before = [template.template for template in templates]
    with unchecked_full_blocks():
        assert all(t.template is not b for t, b in zip(templates, before, strict=True))
    assert all(t.template is b for t, b in zip(templates, before, strict=True))


@needs_its_torch
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def bwd_dq_block_mn(", "def another("),
        ("    if not IS_DIVISIBLE:\n", "    if True:\n"),
        ("indices % max_len", "indices"),
    ],
)
def test_other_templates_are_refused(old: str, new: str) -> None:
    changed = source("flex_attention_backward").replace(old, new, 1)
    with pytest.raises(HostError, match="differ from those that aotpack was made for"):
        edited("flex_attention_backward", changed)
