"""Scored attention built for CUDA without a GPU, and what its manifest says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aotpack.build import absent, build
from aotpack.package import Package, Variant
from tests.score_specs import SPECS

# The graphs that are built here are looked at in test_scored_cuda_graphs.py, every time.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        torch.__version__.partition("+")[0] not in absent.TRIED or torch.version.cuda is None,
        reason="building for CUDA needs the wheel of torch 2.14.1 for CUDA",
    ),
]


@pytest.fixture(scope="module")
def variant(built: Path) -> Variant:
    """A chain of a soft cap, sinks and trained tensors with axes of any length."""
    path = built / "scores-sm90.aotpack"
    if not path.exists():
        build({"chain": SPECS["chain"]}, ["cuda-sm90"], path)
    with Package.open(path) as package:
        (found,) = package.manifest.variants
    return found


def test_every_specialisation_takes_the_scores_tensors_and_returns_their_gradients(variant: Variant) -> None:
    kinds = [program.specialisation for program in variant.programs if program.name == "forward"]
    assert kinds == ["div128", "int32", "general"]
    for kind in kinds:
        forward, backward = variant.program("forward", kind), variant.program("backward", kind)
        assert forward is not None
        assert backward is not None
        score = [name for name in forward.inputs if name.startswith("score.")]
        assert score == ["score.offsets", "score.levels", "score.sinks", "score.groups"]
        assert forward.outputs == ("out", "lse")
        assert backward.outputs == (
            *("grad.q", "grad.k", "grad.v"),
            *("grad.score.offsets", "grad.score.levels", "grad.score.sinks"),
        )
        assert set(backward.inputs) <= {*forward.inputs, "out", "lse", "grad.out", "grad.lse"}
        assert "rows" not in forward.bounds


def test_gradients_of_the_scores_tensors_have_a_tolerance(variant: Variant) -> None:
    assert {"grad.score.offsets", "grad.score.levels", "grad.score.sinks"} <= set(variant.tolerance)


def test_each_specialisation_has_its_own_flex_attention_kernels(variant: Variant) -> None:
    cuda = variant.requires.cuda
    assert cuda is not None
    assert cuda.capability == "9.0a"
    assert sum("flex_attention" in kernel.name for kernel in cuda.kernels) >= 6
