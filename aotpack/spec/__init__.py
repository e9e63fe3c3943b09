"""What to compile, and nothing about where: attention, mask and score specs with a canonical digest."""

from aotpack.spec.attention import DTYPES, PRECISIONS, SCHEMA, AttentionSpec, differences
from aotpack.spec.mask import MaskSpec
from aotpack.spec.score import ScoreSpec
from aotpack.spec.tensors import TensorInput

__all__ = [
    "DTYPES",
    "PRECISIONS",
    "SCHEMA",
    "AttentionSpec",
    "MaskSpec",
    "ScoreSpec",
    "TensorInput",
    "differences",
]
