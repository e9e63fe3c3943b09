"""One call of flex_attention: checked, recorded as a spec, and answered."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.errors import SpecError
from aotpack.graph import Graph
from aotpack.masks import Lengths
from aotpack.recording.answering import Rule, attend, check_blocks, kind, visible_cells
from aotpack.recording.axes import declared
from aotpack.recording.closures import closure_of, namer
from aotpack.recording.expressions import nodes_of, parts
from aotpack.recording.interception import with_statistics
from aotpack.recording.numbers import NumberCheck
from aotpack.recording.recognition import Named, recognised
from aotpack.recording.result import Call
from aotpack.recording.tracing import Recorded, record, title
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec, TensorInput

__all__ = ["Recorder"]

# Values of kernel options with which flex_attention computes something else than without.
_OTHER_RESULTS: Final = {"PRESCALE_QK": (True,), "BACKEND": ("FLASH",)}
_SCORE: Final = ("score", "b", "h", "q", "kv")
_MASK: Final = ("b", "h", "q", "kv")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Read:
    """A mask or score function of one call."""

    title: str
    rule: Rule
    recorded: Recorded
    inputs: tuple[TensorInput, ...]


class Recorder:
    """Answers the calls of one capture.

    Attributes:
        found: each call with its spec.
    """

    def __init__(self, static_numbers: Collection[str]) -> None:
        self.found: list[tuple[AttentionSpec, Call]] = []
        self._numbers = NumberCheck(static_numbers)

    def answer(
        self,
        *,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float | None,
        enable_gqa: bool,
        return_lse: bool,
        kernel_options: Mapping[str, Any] | None,
        return_aux: Any,
    ) -> Any:
        """The outputs that flex_attention has for these arguments; the call is noted."""
        query, key, value = _autocast(query, key, value)
        _check_tensors(query, key, value, enable_gqa)
        _check_options(kernel_options or {}, return_aux)
        scores = query.new_empty(()).expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        mask = None if block_mask is None else self._mask(block_mask, scores)
        score = None if score_mod is None else self._read(score_mod, _SCORE, scores)
        if score is not None and score.recorded.expression.kind == "cell":
            score = None
        spec, tensors = _spec(query, key, value, scale, mask, score)
        call = Call(
            spec="",
            batch=query.shape[0],
            query_len=query.shape[2],
            key_len=key.shape[2],
            return_lse=return_lse or bool(return_aux is not None and return_aux.lse),
            kernel_options=dict(kernel_options or {}),
            tensors=tensors,
        )
        self.found.append((spec, call))
        visible = None
        if mask is not None and mask.rule.lives_with(query):
            visible = visible_cells(mask.rule, scores)
        rule = score.rule if score is not None and score.rule.lives_with(query) else None
        out, lse = attend(query, key, value, spec.scale, visible, rule)
        return with_statistics(out, lse, return_lse, return_aux)

    def _mask(self, block_mask: Any, scores: Tensor) -> _Read:
        batch, _, query, key = scores.shape
        found = tuple(int(size) for size in block_mask.shape[-2:])
        if found != (query, key):
            raise SpecError("the BlockMask was made for other lengths", expected=(query, key), found=found)
        read = self._read(block_mask.mask_mod, _MASK, scores)
        if any(part.kind == "cell" and part.name == "h" for part in parts(read.recorded.expression)):
            raise SpecError(
                f"the mask '{read.title}' differs between heads",
                expected="a mask function that does not read h",
                remedy="hide cells in the score function, or call attention once for each group of heads",
            )
        tensors = (scores, block_mask.kv_num_blocks, *read.rule.tensors.values())
        if all(kind(tensor) == "real" for tensor in tensors):
            visible = visible_cells(read.rule, scores).expand(batch, 1, query, key)
            check_blocks(read.title, block_mask, visible)
        return read

    def _read(self, function: Any, cells: tuple[str, ...], scores: Tensor) -> _Read:
        batch, heads, query, key = scores.shape
        lengths = Lengths(batch=batch, query=query, key=key)
        closure = closure_of(function)
        self._numbers.held(function, closure, lengths)
        recorded = record(function, cells, namer(closure), scores)
        self._numbers.computed(function, closure, lengths, recorded.expression, recorded.tensors)
        sizes = {"B": batch, "H": heads, "Q": query, "K": key}
        inputs = declared(title(function), recorded.expression, recorded.tensors, sizes)
        nodes, result = nodes_of(recorded.expression)
        graph = Graph.parse(Graph(nodes, result, inputs).to_json(), inputs, cells)
        return _Read(
            title=title(function), rule=Rule(graph, recorded.tensors), recorded=recorded, inputs=inputs
        )


def _spec(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, mask: _Read | None, score: _Read | None
) -> tuple[AttentionSpec, dict[str, str]]:
    """The spec of a call, and the variables that hold the tensors of its rules."""
    named: Named | None = Named(MaskSpec(family="full"), {})
    if mask is not None:
        named = recognised(mask.recorded.expression, mask.inputs)
    if named is None:
        assert mask is not None
        graph = mask.rule.graph.to_json()
        named = Named(
            MaskSpec(family="recorded", graph=graph, inputs=mask.inputs or None),
            {given.name: given.name for given in mask.inputs},
        )
    modification = None
    tensors = dict(named.tensors)
    if score is not None:
        modification = ScoreSpec(
            family="recorded", graph=score.rule.graph.to_json(), inputs=score.inputs or None
        )
        tensors |= {given.name: given.name for given in score.inputs}
    spec = AttentionSpec(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[3],
        value_dim=v.shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        scale=math.nan if scale is None else float(scale),
        mask=named.mask,
        score=modification,
    )
    return spec, tensors


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tensors as torch's operator sees them: under autocast, of its dtype."""
    device = q.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1:
        raise _unfit("one dtype for q, k and v", f"{q.dtype}, {k.dtype} and {v.dtype}", "cast them")
    if any(tensor.dim() != 4 for tensor in (q, k, v)):
        raise _unfit("q, k and v of four axes [batch, heads, length, size]", shapes)
    if q.shape[3] != k.shape[3]:
        raise _unfit("q and k of one head size", shapes)
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3]:
        raise _unfit("q, k and v of one batch, and k and v of the same heads and length", shapes)
    if q.shape[1] % k.shape[1] or (q.shape[1] != k.shape[1] and not enable_gqa):
        raise _unfit("query heads that are the key heads, or with enable_gqa a multiple of them", shapes)


def _check_options(options: Mapping[str, Any], return_aux: Any) -> None:
    if return_aux is not None and return_aux.max_scores:
        raise _unfit("no auxiliary output but the log-sum-exp", return_aux, "ask for lse alone")
    for name, value in options.items():
        plain = name.removeprefix("fwd_").removeprefix("bwd_")
        if value in _OTHER_RESULTS.get(plain, ()):
            raise _unfit("kernel options that change speed alone", f"{name}={value!r}", "leave it out")


def _unfit(expected: str, found: object, remedy: str = "change the call") -> SpecError:
    return SpecError(
        "the model calls flex_attention in a way that no package has",
        expected=expected,
        found=found,
        remedy=remedy,
    )
