"""Named score modifications: soft cap, ALiBi, relative and dense bias, attention sinks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from aotpack.scores.family import Family, Rule, check_parameters
from aotpack.spec import ScoreSpec, TensorInput

__all__ = ["FAMILIES"]


def _softcap(score: ScoreSpec) -> Family:
    """``cap * tanh(score / cap)``, as in Gemma 2 (arXiv:2408.00118, section 2)."""
    check_parameters(score, {"cap"})
    cap = score.cap or 1.0

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        return lambda s, b, h, q, kv: cap * torch.tanh(s / cap)

    return Family(name=score.family, rule=rule)


def _alibi(score: ScoreSpec) -> Family:
    """``score + slope[h] * (kv - q)``; slopes as in ALiBi (arXiv:2108.12409, section 3 and its code).

    For a power of two ``n`` of heads the slopes are ``2 ** (-8 * i / n)``, i from 1 to n. Other counts take
    those of the next smaller power of two and then every other one of the next larger.
    """
    check_parameters(score)

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        power = 1 << heads.bit_length() - 1

        def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            first, later = 8 / power * (h + 1), 4 / power * (2 * (h - power) + 1)
            slope = torch.exp2(-torch.where(h < power, first, later))
            return s + slope * (kv - q)

        return biased

    return Family(name=score.family, rule=rule)


def _relative_bias(score: ScoreSpec) -> Family:
    """``score + table[h, clamp(kv - q, -R, R) + R]``, R the ``distance``, as in T5 without its buckets.

    ``table`` is float32 [heads, 2 * R + 1].
    """
    check_parameters(score, {"distance"}, {"frozen"})
    reach = score.distance or 1
    table = TensorInput(name="table", dtype="float32", dims=("H", 2 * reach + 1), gradient=not score.frozen)

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        def biased(s: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            # Not clamp: Inductor makes C++ that does not compile of a tensor indexed by it (torch 2.14.1).
            place = kv - q + reach
            place = torch.where(place < 0, 0, torch.where(place > 2 * reach, 2 * reach, place))
            return s + tensors["table"][h, place]

        return biased

    return Family(name=score.family, inputs=(table,), rule=rule)


def _bias(score: ScoreSpec) -> Family:
    """``score + bias[h, q, kv]``; ``bias`` is float32 [heads, Q, K], one for all batch entries."""
    check_parameters(score, (), {"frozen"})
    bias = TensorInput(name="bias", dtype="float32", dims=("H", "Q", "K"), gradient=not score.frozen)

    def rule(tensors: Mapping[str, Tensor], heads: int) -> Rule:
        return lambda s, b, h, q, kv: s + tensors["bias"][h, q, kv]

    return Family(name=score.family, inputs=(bias,), rule=rule)


def _sinks(score: ScoreSpec) -> Family:
    """Attention sinks as in gpt-oss: ``sinks`` float32 [heads], one more logit in each row's denominator.

    The log-sum-exp holds the sink too, except in empty rows, whose output is 0 and whose log-sum-exp is -inf.
    """
    check_parameters(score, (), {"frozen"})
    sinks = TensorInput(name="sinks", dtype="float32", dims=("H",), gradient=not score.frozen)
    return Family(name=score.family, inputs=(sinks,), sinks="sinks")


FAMILIES: Final[Mapping[str, Callable[[ScoreSpec], Family]]] = {
    "alibi": _alibi,
    "bias": _bias,
    "relative-bias": _relative_bias,
    "sinks": _sinks,
    "softcap": _softcap,
}
