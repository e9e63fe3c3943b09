"""Mask families as pure tensor functions of the cell indices (b, q, kv).

A rule is called with broadcastable int64 index tensors, never with a loop over cells, so one definition
serves the ahead-of-time block-mask program, the forward kernels and the dense reference.

Axes: B batch, N anchors, S context length, T packed length, bs block size. "q" and "kv" are absolute
indices into the query and key axes. A row without a visible cell is empty: its output is 0, its
log-sum-exp -inf and its gradients 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.spec import MaskSpec

__all__ = ["FAMILIES", "Family", "Input", "Lengths", "Rule", "dense", "family_of"]

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Sizes of one mask's axes, in tokens; ``batch`` is 1 for a mask that all entries share."""

    batch: int
    query: int
    key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Input:
    """A tensor that a rule reads.

    Attributes:
        name: of the argument.
        dtype: that callers give it in.
        dims: its axes: "B", "N" or "T".
        positions: whether its values are positions on an axis, which fit 32 bits.
    """

    name: str
    dtype: torch.dtype
    dims: tuple[str, ...]
    positions: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """A named mask rule.

    Attributes:
        name: as in ``MaskSpec.family``.
        inputs: the tensors of the rule, in the order of the compiled programs' arguments.
        required: parameters of ``MaskSpec`` that must be given.
        optional: parameters that may be given.
        drafts: whether the query axis is made of N blocks of ``block_size`` rows that are also the last
            keys, so that all lengths follow from the inputs and the context length.
        rule: ``rule(spec, inputs, lengths)`` returns the cells' visibility as a function of (b, q, kv).
    """

    name: str
    inputs: tuple[Input, ...]
    required: frozenset[str]
    optional: frozenset[str]
    drafts: bool
    rule: Callable[[MaskSpec, Mapping[str, Tensor], Lengths], Rule]

    @property
    def batched(self) -> bool:
        """Whether the mask differs between batch entries."""
        return any("B" in given.dims for given in self.inputs)

    def check(self, mask: MaskSpec) -> None:
        """Raises ``SpecError`` when a parameter is missing or means nothing to this family."""
        given = set(mask.to_dict()) - {"family"}
        if missing := sorted(self.required - given):
            raise SpecError(f"mask family '{self.name}' needs {', '.join(missing)}", found=mask.to_dict())
        if extra := sorted(given - self.required - self.optional):
            raise SpecError(
                f"mask family '{self.name}' takes no {', '.join(extra)}",
                expected=", ".join(sorted(self.required | self.optional)) or "no parameters",
                found=mask.to_dict(),
                remedy="remove it or choose another family",
            )


def _draft_block(q: Tensor, block_size: int, last: int) -> Tensor:
    # Rows past the last anchor exist only as padding of the last 128-row block; the clamp keeps the
    # gather in range and the row count hides them.
    return (q // block_size).clamp(max=last)


def _dflash(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """SpecForge's and TorchSpec's rule; the window's lower bound moves with the offset in the block."""
    anchors, keep = inputs["anchors"], inputs["keep"]
    size, window = mask.block_size or 1, mask.window
    # Sizes are read out here: Inductor cannot read one inside a rule that it compiles into attention.
    context_len, last = lengths.key - lengths.query, anchors.shape[-1] - 1

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block, offset = _draft_block(q, size, last), q % size
        anchor = anchors[b, block]
        context = (kv < context_len) & (kv < anchor)
        own = (kv >= context_len) & ((kv - context_len) // size == block)
        if window is not None:
            context = context & (kv >= anchor + offset - (window - 1))
            own = own & ((kv - context_len) % size <= offset)
        return (context | own) & keep[b, block] & (q < lengths.query)

    return rule


def _dflash_speculators(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    """speculators' rule: packed documents, and a window whose lower bound does not move in the block."""
    documents, anchors = inputs["document_ids"], inputs["anchors"]
    size, window = mask.block_size or 1, mask.window
    packed_len, last = lengths.key - lengths.query, anchors.shape[-1] - 1

    def rule(b: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        block = _draft_block(q, size, last)
        anchor = anchors[block]
        document = documents[anchor]
        same = (documents[kv.clamp(max=packed_len - 1)] == document) & (document != -1)
        base = (kv < packed_len) & same & (kv < anchor)
        own = (kv >= packed_len) & ((kv - packed_len) // size == block)
        if window is not None:
            base = base & (kv >= anchor - window)
            if mask.causal:
                own = own & (kv <= q + packed_len)
        return (base | own) & (b >= 0) & (q < lengths.query)

    return rule


def _causal(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    return lambda b, q, kv: (q >= kv) & (b >= 0)


def _full(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Rule:
    return lambda b, q, kv: (b >= 0) & (q >= 0) & (kv >= 0)


_ANCHORS = Input(name="anchors", dtype=torch.int64, dims=("B", "N"), positions=True)
_KEEP = Input(name="keep", dtype=torch.bool, dims=("B", "N"))
_PACKED_ANCHORS = Input(name="anchors", dtype=torch.int64, dims=("N",), positions=True)
_DOCUMENTS = Input(name="document_ids", dtype=torch.int64, dims=("T",))
_NONE: Final[frozenset[str]] = frozenset()

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        Family(
            name="dflash",
            inputs=(_ANCHORS, _KEEP),
            required=frozenset({"block_size"}),
            optional=frozenset({"window"}),
            drafts=True,
            rule=_dflash,
        ),
        Family(
            name="dflash-speculators",
            inputs=(_DOCUMENTS, _PACKED_ANCHORS),
            required=frozenset({"block_size"}),
            optional=frozenset({"window", "causal"}),
            drafts=True,
            rule=_dflash_speculators,
        ),
        Family(name="causal", inputs=(), required=_NONE, optional=_NONE, drafts=False, rule=_causal),
        Family(name="full", inputs=(), required=_NONE, optional=_NONE, drafts=False, rule=_full),
    )
}


def family_of(mask: MaskSpec) -> Family:
    """The family that a mask spec names, its parameters checked; ``SpecError`` when there is none."""
    family = FAMILIES.get(mask.family)
    if family is None:
        raise SpecError(
            "the mask family is unknown",
            expected=" or ".join(sorted(FAMILIES)),
            found=mask.family,
            remedy="choose a listed family",
        )
    family.check(mask)
    return family


def dense(mask: MaskSpec, inputs: Mapping[str, Tensor], lengths: Lengths) -> Tensor:
    """Every cell's visibility: bool [batch, 1, query, key] on the inputs' device.

    This holds the whole grid; it is for references and the eager fallback, not for training.
    """
    device = next((t.device for t in inputs.values()), torch.device("cpu"))
    b = torch.arange(lengths.batch, device=device).view(-1, 1, 1, 1)
    q = torch.arange(lengths.query, device=device).view(1, 1, -1, 1)
    kv = torch.arange(lengths.key, device=device).view(1, 1, 1, -1)
    return family_of(mask).rule(mask, inputs, lengths)(b, q, kv)
