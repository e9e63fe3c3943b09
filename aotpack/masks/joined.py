"""``and`` and ``or`` of masks: the parts share their axes, and tensors of one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Final

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.masks.family import Ends, Family, Input, Lengths, Rule, Seen
from aotpack.spec import MaskSpec

__all__ = ["OPERATORS", "joined"]

OPERATORS: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "and": torch.logical_and,
    "or": torch.logical_or,
}


def joined(mask: MaskSpec, family_of: Callable[[MaskSpec], Family]) -> Family:
    """The family of a mask that joins others.

    Raises:
        SpecError: there are no parts, the axes of the parts differ, or one name stands for two tensors.
    """
    Family(name=mask.family, required=frozenset({"parts"}), rule=_unused).check(mask)
    parts = [(part, family_of(part)) for part in mask.parts or ()]
    families = [family for _, family in parts]
    _check_axes(mask, parts)
    combine = OPERATORS[mask.family]

    def rule(spec: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
        rules = [family.rule(part, inputs, lengths) for part, family in parts]
        return lambda b, q, kv: reduce(combine, [each(b, q, kv) for each in rules])

    def intervals(spec: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Seen:
        seen = [family.intervals(part, inputs, lengths) for part, family in parts if family.intervals]
        join = _intersections if mask.family == "and" else list.__add__
        return lambda b, q: reduce(join, [list(each(b, q)) for each in seen])

    return Family(
        name=mask.family,
        inputs=_inputs(families),
        required=frozenset({"parts"}),
        drafts=any(family.drafts for family in families),
        square=any(family.square for family in families),
        unrolled=any(family.unrolled for family in families),
        rule=rule,
        intervals=intervals if all(family.intervals for family in families) else None,
    )


def _intersections(some: list[Ends], others: list[Ends]) -> list[Ends]:
    """Each of some intervals cut by each of others."""
    return [
        (torch.maximum(low, least), torch.minimum(high, most)) for low, high in some for least, most in others
    ]


def _inputs(families: list[Family]) -> tuple[Input, ...]:
    found: dict[str, Input] = {}
    for family in families:
        for given in family.inputs:
            if found.setdefault(given.name, given) != given:
                raise SpecError(
                    f"two masks that are joined take different tensors named '{given.name}'",
                    expected=f"{found[given.name].dims} of {found[given.name].dtype}",
                    found=f"{given.dims} of {given.dtype}",
                    remedy="rename one, in a rule of your own",
                )
    return tuple(found.values())


def _check_axes(mask: MaskSpec, parts: list[tuple[MaskSpec, Family]]) -> None:
    drafting = {part.draft_size for part, family in parts if family.drafts}
    clashing = sorted(family.name for _, family in parts if family.square or family.unrolled)
    if len(drafting) > 1 or (drafting and clashing):
        raise SpecError(
            f"the masks joined by '{mask.family}' have different axes",
            expected="drafting masks of one block_size, or masks of plain sequences",
            found=", ".join(str(part.to_dict()) for part, _ in parts),
        )


def _unused(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    raise NotImplementedError
