"""The scored attentions of the tests; some of them make one package, built once a session."""

from __future__ import annotations

from typing import Any, Final

from aotpack.own import resolve
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec
from tests.conftest import MASKS, SMALL

__all__ = ["PACKAGED", "SPECS"]

_CAUSAL: Final = MaskSpec(family="causal")
_CAP: Final = ScoreSpec(family="softcap", cap=2.5)


def _spec(mask: MaskSpec, score: ScoreSpec, **fields: Any) -> AttentionSpec:
    return resolve(AttentionSpec(**{"dtype": "float32", **SMALL, **fields}, mask=mask, score=score))


SPECS: Final = {
    "softcap": _spec(_CAUSAL, _CAP, deterministic=True),
    # Another mask, the same programs of attention.
    "softcap-dflash": _spec(MASKS["full"], _CAP),
    "alibi": _spec(MASKS["full"], ScoreSpec(family="alibi")),
    "relative": _spec(_CAUSAL, ScoreSpec(family="relative-bias", distance=40)),
    "relative-frozen": _spec(
        MASKS["full"], ScoreSpec(family="relative-bias", distance=40, frozen=True), deterministic=True
    ),
    "bias": _spec(MASKS["full"], ScoreSpec(family="bias")),
    "sinks": _spec(MASKS["full"], ScoreSpec(family="sinks"), deterministic=True),
    "tempered": _spec(_CAUSAL, ScoreSpec(family="tests.score_rules:tempered")),
    "chain": _spec(
        MASKS["full"],
        ScoreSpec(
            family="chain",
            parts=(
                _CAP,
                ScoreSpec(family="sinks"),
                ScoreSpec(family="tests.score_rules:grouped"),
            ),
        ),
        dtype="bfloat16",
    ),
}

PACKAGED: Final = {name: SPECS[name] for name in ("softcap", "softcap-dflash", "sinks", "tempered", "chain")}
