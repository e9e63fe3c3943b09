"""Score families without a package: names, parameters, dense math in the eager fallback."""

from __future__ import annotations

import pytest
import torch

from aotpack.errors import SpecError, UnsupportedError
from aotpack.runtime.attention import Attention
from aotpack.scores import check_score, family_of
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec, TensorInput
from tests.conftest import SMALL
from tests.score_cases import exact, run, score_case
from tests.score_specs import SPECS


@pytest.mark.parametrize("name", SPECS)
def test_the_eager_fallback_agrees_with_dense_fp64_math(name: str) -> None:
    case = score_case(SPECS[name], 2, 150, 9)
    attend = Attention(name, SPECS[name], torch.device("cpu"), None)
    for found, right in zip(run(attend, case), exact(case), strict=True):
        case.check(found, right)


@pytest.mark.parametrize(("heads", "expected"), [
    (1, [2**-8.0]), (2, [2**-4.0, 2**-8.0]), (3, [2**-4.0, 2**-8.0, 2**-2.0]),
    (12, [2**-i for i in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]),
])  # fmt: skip
def test_alibi_slopes_of_any_number_of_heads(heads: int, expected: list[float]) -> None:
    family = family_of(ScoreSpec(family="alibi"))
    zero = torch.zeros(1, heads, 1, 1)
    at = (torch.tensor(0), torch.arange(heads).view(1, -1, 1, 1), torch.tensor(3), torch.tensor(4))
    torch.testing.assert_close(family.modify(zero, {}, *at).flatten(), torch.tensor(expected))


def test_frozen_tensors_get_no_gradient() -> None:
    for name in ("relative-bias", "bias", "sinks"):
        fields = {"distance": 3} if name == "relative-bias" else {}
        assert len(family_of(ScoreSpec(family=name, **fields)).trained) == 1
        assert family_of(ScoreSpec(family=name, frozen=True, **fields)).trained == ()


@pytest.mark.parametrize(("score", "message"), [
    (ScoreSpec(family="softcup"), "score family is unknown"),
    (ScoreSpec(family="softcap"), "needs cap"),
    (ScoreSpec(family="alibi", cap=2.0), "takes no cap"),
    (ScoreSpec(family="chain", parts=(ScoreSpec(family="sinks"),) * 2), "name a tensor 'sinks'"),
    (ScoreSpec(family="my:rule", inputs=(TensorInput(name="mask", dtype="float32", dims=()),)),
     "a tensor named 'mask', which attention itself takes"),
])  # fmt: skip
def test_scores_that_mean_nothing(score: ScoreSpec, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        family_of(score)


def test_deterministic_gradients_are_refused_where_sums_have_no_order() -> None:
    def spec(score: ScoreSpec) -> AttentionSpec:
        mask = MaskSpec(family="causal")
        return AttentionSpec(dtype="float32", mask=mask, score=score, deterministic=True, **SMALL)

    with pytest.raises(UnsupportedError, match="gradients of score 'relative-bias' are not deterministic"):
        check_score(spec(ScoreSpec(family="relative-bias", distance=4)))
    for score in (
        ScoreSpec(family="relative-bias", distance=4, frozen=True),
        ScoreSpec(family="sinks"),
        ScoreSpec(family="softcap", cap=4.0),
    ):
        check_score(spec(score))


def test_a_chain_orders_trained_tensors_first_and_sinks_last_of_them() -> None:
    names = [given.name for given in family_of(SPECS["chain"].score).inputs]
    assert names == ["offsets", "levels", "sinks", "groups"]
