"""Random steps of scored attention, and the dense fp64 math that they are compared with.

The rules are written here once more, from their definitions, and applied to whole grids.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import aotpack
from aotpack.scores import family_of
from aotpack.spec import AttentionSpec, ScoreSpec
from tests.cases import make_case, relative_error, visible_cells

TOLERANCE = {"float32": 2e-5, "bfloat16": 1.2e-2}


@dataclass(frozen=True, kw_only=True)
class ScoreCase:
    """One step: tensors of the attention call, of its mask and of its score."""

    spec: AttentionSpec
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    mask: dict[str, object]
    visible: Tensor
    score: dict[str, Tensor]

    @property
    def mask_batch(self) -> int:
        return self.visible.shape[0]

    def check(self, found: Tensor, right: Tensor, tolerance: float | None = None) -> None:
        """Fails unless ``found`` is near ``right``."""
        assert relative_error(found, right) < (tolerance or TOLERANCE[self.spec.dtype])


def score_case(spec: AttentionSpec, batch: int, context: int, anchors: int, seed: int = 0) -> ScoreCase:
    """A step of about these lengths; some rows are empty where the mask has ``keep``."""
    case = make_case(spec, batch, context, anchors, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    known = {"B": batch, "H": spec.heads, "Q": case.q.shape[2], "K": case.key_length}
    score = {}
    for given in family_of(spec.score).inputs if spec.score is not None else ():
        shape = [known.get(axis, 5) if isinstance(axis, str) else axis for axis in given.dims]
        dtype = getattr(torch, given.dtype)
        score[given.name] = (
            torch.randn(shape, generator=generator).to(dtype)
            if dtype.is_floating_point
            else torch.randint(0, 5, shape, generator=generator, dtype=dtype)
        )
    return ScoreCase(
        spec=spec, q=case.q, k=case.k, v=case.v, grad_out=case.grad_out, grad_lse=case.grad_lse,
        mask=case.mask, visible=visible_cells(spec, case), score=score,
    )  # fmt: skip


def run(attention: aotpack.Attention, case: ScoreCase) -> list[Tensor]:
    """out, lse, dq, dk, dv and the gradients of the trained tensors, in the family's order."""
    q, k, v = (t.detach().clone().requires_grad_() for t in (case.q, case.k, case.v))
    trained = [given.name for given in family_of(case.spec.score).trained]
    score = {n: t.clone().requires_grad_(t.is_floating_point()) for n, t in case.score.items()}
    out, lse = attention(q, k, v, attention.block_mask(**case.mask), return_lse=True, **score)
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    assert all(score[name].grad is None for name in score.keys() - set(trained))
    found = [out.detach(), lse.detach(), q.grad, k.grad, v.grad, *(score[name].grad for name in trained)]
    assert all(tensor is not None for tensor in found)
    return found


def exact(case: ScoreCase, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """As ``run``, by dense math in ``dtype``; empty rows are 0, -inf and 0."""
    spec = case.spec
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (case.q, case.k, case.v))
    trained = [given.name for given in family_of(spec.score).trained]
    score = {
        n: t.to(dtype).requires_grad_(n in trained) if t.is_floating_point() else t
        for n, t in case.score.items()
    }
    group = spec.heads // spec.kv_heads
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * spec.scale
    for part in spec.score.leaves():
        scores = _modified(part, scores, score)
    empty = ~case.visible.any(-1)
    scores = torch.where(case.visible, scores, -torch.inf)
    sinks = score["sinks"] if "sinks" in score else torch.full((spec.heads,), -torch.inf, dtype=dtype)
    extra = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    logits = torch.where(empty[..., None], 0, torch.cat([scores, extra], -1))
    probabilities = logits.softmax(-1)[..., :-1] * case.visible
    out = probabilities @ v.repeat_interleave(group, 1)
    lse = torch.where(empty, 0, logits.logsumexp(-1))
    weight = torch.where(empty, 0, case.grad_lse.to(dtype))
    wanted = [q, k, v, *(score[name] for name in trained)]
    grads = torch.autograd.grad([out, lse], wanted, [case.grad_out.to(dtype), weight])
    return [out.detach(), torch.where(empty, -torch.inf, lse).detach(), *grads]


def _modified(score: ScoreSpec, scores: Tensor, tensors: dict[str, Tensor]) -> Tensor:
    heads, query, key = scores.shape[1:]
    distance = torch.arange(key)[None, :] - torch.arange(query)[:, None]
    match score.family:
        case "softcap":
            return score.cap * (scores / score.cap).tanh()
        case "alibi":
            assert heads == 6
            slopes = torch.tensor([2**-2.0, 2**-4.0, 2**-6.0, 2**-8.0, 2**-1.0, 2**-3.0])
            return scores + slopes.to(scores.dtype)[:, None, None] * distance
        case "relative-bias":
            return (
                scores + tensors["table"][:, distance.clamp(-score.distance, score.distance) + score.distance]
            )
        case "bias":
            return scores + tensors["bias"]
        case "sinks":
            return scores
        case "tests.score_rules:tempered":
            return scores * tensors["temperature"] + tensors["weights"]
        case "tests.score_rules:grouped":
            of_row = tensors["levels"][tensors["groups"]]
            return scores + tensors["offsets"][:, :, None, None] * 0.5 + of_row[:, None]
    raise AssertionError(score.family)
