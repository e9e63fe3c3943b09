"""One candidate of a tuning: its results are checked, then it is timed in turns with the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from aotpack.bench.case import Case
from aotpack.bench.jobs.clock import Chain
from aotpack.bench.jobs.drawing import RESULTS, Step, dense_results, draw_step, relative_errors
from aotpack.errors import SelfTestError
from aotpack.package import Package
from aotpack.runtime import Attention, load
from aotpack.spec import AttentionSpec

__all__ = ["candidate"]

_Measured = tuple[dict[str, Any], Callable[[], dict[str, float]]]
_LINKS: Final = {"forward": 1, "backward": 2}


def candidate(
    case: Case,
    package: str,
    untuned: str,
    spec: dict[str, Any],
    direction: str,
    lengths: Sequence[Sequence[int]],
    checked: Sequence[Sequence[int]],
    repeats: int,
) -> _Measured:
    """Seconds of one direction at each lengths; says once the largest relative error that was found.

    Results are compared with dense fp64 math and with the untuned candidate's, and must be the same, bit by
    bit, however often they are computed: kernels that race are mostly right.

    Args:
        case: the spec's name and the device.
        package, untuned: the candidate's package and the one that it is compared with.
        spec: that both must have.
        direction: what is timed.
        lengths: batch, query and key length of each call that is timed, and checked before.
        checked: of calls that are checked only.
        repeats: how often each call is repeated.

    Raises:
        SelfTestError: the results are wrong.
        MismatchError: the package is of another spec.
    """
    wanted = AttentionSpec.from_dict(spec)
    attend, plain = (
        load(path, case.device, specs={case.spec: wanted}).attention(case.spec) for path in (package, untuned)
    )
    with Package.open(Path(package)) as opened:
        variants = opened.manifest.variants
    tolerance = next(each.tolerance for each in variants if each.spec == wanted.digest)
    worst = 0.0
    for each in (*checked, *lengths):
        step = draw_step(wanted, each[0], each[1], each[2], case.device)
        worst = max(worst, _check(attend, plain, step, tolerance, repeats))
    chains = {
        ",".join(map(str, each)): _chain(attend, wanted, each, case.device, direction) for each in lengths
    }

    def measure() -> dict[str, float]:
        return {name: chain.seconds()[-1] for name, chain in chains.items()}

    return {"error": worst}, measure


def _chain(
    attend: Attention, spec: AttentionSpec, lengths: Sequence[int], device: str, direction: str
) -> Chain:
    step = draw_step(spec, lengths[0], lengths[1], lengths[2], device)
    mask = attend.block_mask(**step.mask)
    links: list[Callable[[Any], Any]] = [
        lambda _: attend(step.q, step.k, step.v, mask),
        lambda out: torch.autograd.grad(out, (step.q, step.k, step.v), step.grad),
    ]
    return Chain(links[: _LINKS[direction]], device)


def _check(
    attend: Attention, plain: Attention, step: Step, tolerance: Mapping[str, float], repeats: int
) -> float:
    """The largest error against dense math."""
    found = _results(attend, step)
    errors = relative_errors(found, dense_results(step))
    _allow(errors, tolerance, "dense fp64 math", step)
    _allow(relative_errors(found, _results(plain, step)), tolerance, "the untuned candidate", step)
    for number in range(repeats):
        again = _results(attend, step)
        if other := [name for name in RESULTS if not torch.equal(found[name], again[name])]:
            raise SelfTestError(f"{', '.join(other)} differed in repetition {number + 1}: the kernels race")
    return max(errors.values())


def _allow(errors: Mapping[str, float], tolerance: Mapping[str, float], of: str, step: Step) -> None:
    for name, error in errors.items():
        if not error <= tolerance[name]:
            raise SelfTestError(
                f"{name} is {error:.2g} from {of}, more than {tolerance[name]:.2g}, at {tuple(step.q.shape)}"
            )


def _results(attend: Attention, step: Step) -> dict[str, Tensor]:
    mask = attend.block_mask(**step.mask)
    out, lse = attend(step.q, step.k, step.v, mask, return_lse=True)
    # An empty row has no log-sum-exp to have a gradient of.
    grad_lse = torch.where(lse.detach().isfinite(), step.grad_lse, 0.0)
    grads = torch.autograd.grad([out, lse], (step.q, step.k, step.v), [step.grad, grad_lse])
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *grads), strict=True))
