"""Which of the measured candidates wins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from aotpack.tuning.entry import Measured

__all__ = ["MARGIN", "best", "mean"]

# What is faster by less is not told from noise; candidates come with the plainest first.
MARGIN: Final = 0.01


def mean(candidate: Measured) -> float:
    """Geometric mean of the medians over all lengths, in seconds; infinite where it was not measured."""
    medians = [timed.median for timed in candidate.timings]
    return math.exp(math.fsum(map(math.log, medians)) / len(medians)) if medians else math.inf


def best(candidates: Sequence[Measured]) -> Measured | None:
    """The first candidate within a hundredth of the fastest; None where none may be chosen.

    Those that may be are right, and were measured at all the lengths that any candidate was measured at.
    """
    lengths = {timed.lengths for candidate in candidates for timed in candidate.timings}
    fit = [
        candidate
        for candidate in candidates
        if candidate.ok and lengths and {timed.lengths for timed in candidate.timings} == lengths
    ]
    fastest = min(map(mean, fit), default=math.inf)
    return next((each for each in fit if mean(each) <= fastest * (1 + MARGIN)), None)
