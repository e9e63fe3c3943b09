"""The graphs of scored attention on the CPU, run as they are, chunk by chunk, against dense fp64 math."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from aotpack.build.export import Graph
from aotpack.build.graphs_cpu import attention_graphs, is_chunked
from aotpack.build.programs_scored import BOUNDS
from aotpack.masks import Lengths, dense, family_of
from aotpack.runtime import chunks
from aotpack.runtime.chunks import Chunked
from aotpack.runtime.torch_mask import adopt
from aotpack.scores import family_of as family_of_score
from tests.score_cases import ScoreCase, exact, score_case
from tests.score_specs import SPECS

CHUNKED = [name for name, spec in SPECS.items() if is_chunked(spec)]
MASK = (
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices", "tiles", "tile_ids"),
)


def runner(graph: Graph) -> Any:
    return lambda tensors: graph.module.forward(*tensors)


def block_mask(case: ScoreCase) -> tuple[Tensor, ...]:
    """The mask's lists and tiles, through torch's own ``create_block_mask``."""
    spec = case.spec
    inputs = {given.name: case.mask[given.name] for given in family_of(spec.mask).inputs}
    lengths = Lengths(batch=case.q.shape[0], query=case.q.shape[2], key=case.k.shape[2])
    visible = dense(spec.mask, inputs, Lengths(**{**vars_of(lengths), "batch": case.mask_batch}))
    mask = create_block_mask(
        lambda b, h, q, kv: visible[b if case.mask_batch > 1 else b * 0, 0, q, kv],
        case.mask_batch, None, lengths.query, lengths.key, device="cpu",
    )  # fmt: skip
    return adopt(mask, case.q, case.k).tensors


def vars_of(lengths: Lengths) -> dict[str, int]:
    return {name: getattr(lengths, name) for name in ("batch", "query", "key")}


def run(name: str, case: ScoreCase) -> list[Tensor]:
    forward, backward = attention_graphs(SPECS[name])
    family = family_of_score(case.spec.score)
    programs = Chunked(
        forward=runner(forward),
        backward=runner(backward),
        forward_inputs=forward.inputs,
        backward_inputs=backward.inputs,
        mask=[f"mask.{each}" for each in MASK],
        score=[f"score.{given.name}" for given in family.inputs],
        rows=BOUNDS["rows"],
    )
    mask, score = block_mask(case), [case.score[given.name] for given in family.inputs]
    out, lse = programs.run_forward(case.q, case.k, case.v, mask, score)
    by_row = {
        "q": case.q, "out": out, "lse": lse, "grad.out": case.grad_out, "grad.lse": case.grad_lse,
    }  # fmt: skip
    return [out, lse, *programs.run_backward(by_row, case.k, case.v, mask, score, len(family.trained))]


@pytest.mark.parametrize("score_bytes", [1, chunks.SCORE_BYTES])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_agree_with_dense_math(name: str, score_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SCORE_BYTES", score_bytes)
    case = score_case(SPECS[name], 2, 150, 17)
    found, expected = run(name, case), exact(case)
    assert len(found) == len(expected)
    for tensor, right in zip(found, expected, strict=True):
        case.check(tensor, right)
