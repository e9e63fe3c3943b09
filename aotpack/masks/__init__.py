"""Mask families as pure tensor functions of the cell indices (b, q, kv).

A rule is called with broadcastable integer index tensors, never with a loop over cells, so one definition
serves the ahead-of-time block-mask program, the forward kernels and the dense reference.

Axes: B batch, N anchors, T context or packed length, Q query length, K key length. "q" and "kv" are absolute
indices into the query and key axes. A row without a visible cell is empty: its output is 0, its log-sum-exp
-inf and its gradients 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.masks import dflash, eagle, sequence
from aotpack.masks.family import Family, Input, Lengths, Rule, Size
from aotpack.masks.joined import OPERATORS, joined
from aotpack.masks.own import own_family
from aotpack.masks.recorded import recorded_family
from aotpack.spec import MaskSpec

__all__ = [
    "FAMILIES",
    "Family",
    "Input",
    "Lengths",
    "Rule",
    "Size",
    "dense",
    "family_of",
    "inside",
    "intervals",
]

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family for family in (*dflash.FAMILIES, *eagle.FAMILIES, *sequence.FAMILIES)
}


def family_of(mask: MaskSpec) -> Family:
    """The family that a mask spec names, its parameters checked.

    Raises:
        SpecError: there is no such family, or a parameter is missing or means nothing to it.
    """
    if mask.family in OPERATORS:
        return joined(mask, family_of)
    if mask.family == "recorded":
        return recorded_family(mask)
    family = own_family(mask) if mask.own else FAMILIES.get(mask.family)
    if family is None:
        raise SpecError(
            "the mask family is unknown",
            expected=" or ".join([*sorted(FAMILIES), *OPERATORS, "a rule of your own, module:function"]),
            found=mask.family,
            remedy="choose a listed family",
        )
    family.check(mask)
    return family


def inside(rule: Rule, lengths: Lengths) -> Rule:
    """A rule for any cell, those outside the axes hidden: the last blocks of an axis may stand out."""

    def bounded(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        in_query, in_key = q < lengths.query, kv < lengths.key
        # A product, because of a tensor indexed by a clamp Inductor makes C++ that does not compile, and of a
        # where with a number it runs a constant on the device that a build does not have (torch 2.14.1).
        visible = rule(b, q * in_query, kv * in_key)
        return visible & (b >= 0) & in_query & in_key

    return bounded


def intervals(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> tuple[Tensor, Tensor] | None:
    """What each row sees: the ends low and high, int64 [batch, query, n] each, of n intervals of keys.

    An interval holds the keys low, ..., high - 1; it may be empty, overlap others and reach past the keys.
    None for a mask whose family does not give intervals.
    """
    seen = family_of(mask).intervals
    if seen is None:
        return None
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    b = torch.arange(lengths.batch, device=device).view(-1, 1, 1)
    q = torch.arange(lengths.query, device=device).view(1, -1, 1)
    shape = (lengths.batch, lengths.query, -1)
    lows, highs = [], []
    for low, high in seen(mask, inputs, lengths)(b, q):
        low, high = torch.broadcast_tensors(low, high)
        lows.append(low.expand(shape))
        highs.append(high.expand(shape))
    return torch.cat(lows, -1), torch.cat(highs, -1)


def dense(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Tensor:
    """Every cell's visibility: bool [batch, 1, query, key] on the inputs' device.

    This holds the whole grid; it is for references and the eager fallback, not for training.
    """
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    b = torch.arange(lengths.batch, device=device).view(-1, 1, 1, 1)
    q = torch.arange(lengths.query, device=device).view(1, 1, -1, 1)
    kv = torch.arange(lengths.key, device=device).view(1, 1, 1, -1)
    visible = family_of(mask).rule(mask, inputs, lengths)(b, q, kv)
    return visible.expand(lengths.batch, 1, lengths.query, lengths.key)
