"""Golden vectors: one small case of a spec with its fp64 results, for the self-test on the node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from safetensors.torch import save
from torch import Tensor

from aotpack.dense import dense_attention
from aotpack.masks import Input, Lengths, dense, family_of
from aotpack.scores import Family as ScoreFamily
from aotpack.scores import family_of as family_of_score
from aotpack.spec import AttentionSpec
from aotpack.spec.tensors import shape_of

__all__ = ["TOLERANCE", "golden_vectors", "tolerances"]

# Largest relative error ||x - fp64|| / ||fp64|| of a tensor, by dtype of the attention.
TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}

_CONTEXT: Final = 150
_BLOCKS: Final = 3
_QUERY: Final = 50


def golden_vectors(spec: AttentionSpec) -> bytes:
    """A safetensors file: q, k, v, mask.*, score.*, grad.out, grad.lse, and out, lse, grad.q, grad.k, grad.v
    and grad.score.*.

    Inputs are small multiples of 1/8, which are exact in every dtype and compress well. Results are fp64
    math rounded to float32, or to float16 where the attention itself is of 16 bits.
    """
    generator = torch.Generator().manual_seed(int(spec.digest[:8], 16))
    inputs, lengths = _mask_inputs(spec)
    visible = dense(spec.mask, inputs, lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randint(-12, 13, shape, generator=generator).double() / 8

    q = draw(1, spec.heads, lengths.query, spec.head_dim).requires_grad_()
    k = draw(1, spec.kv_heads, lengths.key, spec.head_dim).requires_grad_()
    v = draw(1, spec.kv_heads, lengths.key, spec.value_dim).requires_grad_()
    grad_out, grad_lse = (
        draw(1, spec.heads, lengths.query, spec.value_dim),
        draw(1, spec.heads, lengths.query),
    )
    score = {} if spec.score is None else _score_inputs(spec, lengths, generator)
    family = ScoreFamily(name="none") if spec.score is None else family_of_score(spec.score)
    exact_score = {given.name: score[given.name].double().requires_grad_() for given in family.trained}
    out, lse = dense_attention(
        q, k, v, visible, spec.scale, **family.for_dense({**score, **exact_score}, lengths.query, lengths.key)
    )
    torch.autograd.backward([out, lse], [grad_out, grad_lse])
    dtype = getattr(torch, spec.dtype)
    exact = torch.float32 if spec.dtype == "float32" else torch.float16
    results = {"out": out, "grad.q": q.grad, "grad.k": k.grad, "grad.v": v.grad}
    of_score = {f"grad.score.{name}": tensor.grad for name, tensor in exact_score.items()}
    tensors = {"q": q, "k": k, "v": v, "grad.out": grad_out}
    return save(
        {
            **{name: t.detach().to(dtype).contiguous() for name, t in tensors.items()},
            **{name: t.detach().to(exact).contiguous() for name, t in results.items() if t is not None},
            **{name: t.float().contiguous() for name, t in of_score.items() if t is not None},
            "grad.lse": grad_lse.float(),
            "lse": lse.detach().float(),
            "lengths": torch.tensor([lengths.batch, lengths.query, lengths.key]),
            **{f"mask.{name}": tensor for name, tensor in inputs.items()},
            **{f"score.{name}": tensor for name, tensor in score.items()},
        }
    )


def tolerances(spec: AttentionSpec) -> dict[str, float]:
    """The largest relative error of each result, by its name among the golden vectors."""
    names = ("out", "lse", "grad.q", "grad.k", "grad.v")
    trained = () if spec.score is None else family_of_score(spec.score).trained
    # Sums over many cells that cancel.
    summed = dict.fromkeys((f"grad.score.{given.name}" for given in trained), 4 * TOLERANCE[spec.dtype])
    return {**dict.fromkeys(names, TOLERANCE[spec.dtype]), **summed}


def _score_inputs(spec: AttentionSpec, lengths: Lengths, generator: torch.Generator) -> dict[str, Tensor]:
    """Small multiples of 1/8; zeros for tensors that are no numbers, or places of unknown range."""
    assert spec.score is not None
    known: dict[str | int, int] = {"B": 1, "H": spec.heads, "Q": lengths.query, "K": lengths.key}
    known |= {"N": _BLOCKS, "T": _CONTEXT}
    inputs = {}
    for given in family_of_score(spec.score).inputs:
        shape = shape_of(given.dims, known, _QUERY)
        dtype = getattr(torch, given.dtype)
        drawn = torch.randint(-8, 9, shape, generator=generator).to(torch.float64) / 8
        inputs[given.name] = (drawn if dtype.is_floating_point else drawn * 0).to(dtype)
    return inputs


def _mask_inputs(spec: AttentionSpec) -> tuple[dict[str, Tensor], Lengths]:
    family, size = family_of(spec.mask), spec.mask.draft_size
    query = _BLOCKS * size if family.drafts else _QUERY
    key = _CONTEXT + query if family.drafts else query if family.square else 3 * query
    sizes: dict[str | int, int] = {"B": 1, "N": _BLOCKS, "T": _CONTEXT, "Q": query, "K": key}

    inputs = {given.name: _example(given, shape_of(given.dims, sizes, _QUERY)) for given in family.inputs}
    return inputs, family.lengths(spec.mask, sizes)


def _example(given: Input, shape: list[int]) -> Tensor:
    """Values that make every part of a known rule matter, and that are in range for any other."""
    last = shape[-1] if shape else 1
    place, half = torch.arange(last), max(1, last // 2)
    values = {
        "anchors": (place + 1) * _CONTEXT // (last + 1),
        # The last anchor is dropped, so that empty rows are part of the test.
        "keep": place < last - 1,
        "document_ids": (place >= half).long(),
        "lengths": torch.full((last,), _QUERY - 7),
        "anchor_pos": torch.where(place < half, place, 2 * (place - half) % half),
        "depth": torch.where(place < half, 0, 1 + (place - half) % 2),
        "prefix": torch.full((last,), _QUERY // 3),
    }
    # All false would hide every cell of many a rule.
    other = place < last - last // 4 if given.dtype == torch.bool else torch.zeros(last, dtype=torch.int64)
    value = values.get(given.name, other).to(given.dtype)
    return (value if shape else value[0]).expand(shape).contiguous()
