"""Golden vectors through the loaded programs: whether this machine computes what the builder promised."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from safetensors.torch import load as parse_vectors
from torch import Tensor

import aotpack
from aotpack.dense import relative_error
from aotpack.errors import InputError
from aotpack.masks import family_of
from aotpack.package import Package, Variant
from aotpack.runtime.attention import Attention
from aotpack.runtime.host import host_facts
from aotpack.runtime.loading import load, variants_here
from aotpack.store import Places, Store, open_package
from aotpack.store.notes import Notes

__all__ = ["Check", "SelfTestReport", "self_test"]

_RESULTS: Final = ("out", "lse", "grad.q", "grad.k", "grad.v")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        spec: name of the spec.
        what: the tensor that is compared with its golden vector, or ``"empty rows"`` and
            ``"all rows empty"``, which must be exactly 0 and have no log-sum-exp.
        error: ``||found - golden|| / ||golden||`` in float64; for empty rows the largest absolute value
            where 0 is right. NaN or infinite where the results are, or are not where they should be.
        tolerance: largest error that passes.
    """

    spec: str
    what: str
    error: float
    tolerance: float

    @property
    def passed(self) -> bool:
        """Whether the error is within the tolerance; NaN is not."""
        return self.error <= self.tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTestReport:
    """All comparisons of one package on one device.

    Attributes:
        digest: of the package.
        device: that it was tested on.
        target: of the variant that ran.
        checks: in the order in which they were made.
        remembered: whether an earlier test of this node found this, and nothing ran now.
    """

    digest: str
    device: str
    target: str
    checks: tuple[Check, ...]
    remembered: bool = False

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)


def self_test(
    source: Places, device: str = "cpu", *, remember: bool = False, offline: bool | None = None
) -> SelfTestReport:
    """Runs forward and backward of every spec on its golden vectors.

    Args:
        source: a package in any place that ``load`` takes.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        remember: take the result of an earlier test of this package, device, driver and torch, if all of it
            passed; and keep this one's.
        offline: as in ``load``; the golden vectors of a package behind a URL are fetched.

    Raises:
        InputError: a variant without golden vectors.
        AotpackError: as ``load`` does.
    """
    if not remember:
        return _tested(source, device, offline)
    notes = Notes(Store().root, "selftests")
    with open_package(source, Store(), offline=offline) as package:
        key = {"digest": package.digest, **_identity(device)}
    if (known := _report(notes.get(key))) is not None:
        return known
    report = _tested(source, device, offline)
    if report.passed:
        notes.put(key, asdict(report))
    return report


def _identity(device: str) -> dict[str, Any]:
    """What a result depends on besides the package."""
    where = torch.device(device)
    versions = {"aotpack": aotpack.__version__, "torch": torch.__version__}
    if where.type != "cuda" or not torch.cuda.is_available():
        return {**versions, "device": where.type, "instructions": torch.backends.cpu.get_cpu_capability()}
    index = torch.cuda.current_device() if where.index is None else where.index
    cuda = host_facts().cuda_devices
    return {**versions, "device": f"cuda:{index}", **(asdict(cuda[index]) if index < len(cuda) else {})}


def _report(note: Mapping[str, Any] | None) -> SelfTestReport | None:
    try:
        checks = tuple(Check(**check) for check in note["checks"]) if note else ()
        known = SelfTestReport(**{**note, "checks": checks, "remembered": True}) if note else None
        return known if known is not None and known.passed and checks else None
    except (KeyError, TypeError):
        return None


def _tested(source: Places, device: str, offline: bool | None) -> SelfTestReport:
    pack = load(source, device, offline=offline)
    checks: list[Check] = []
    with open_package(source, Store(), offline=offline) as package:
        chosen = variants_here(package.manifest, str(pack.device))
        for name, spec in package.manifest.specs.items():
            variant = chosen[spec.digest]
            checks += _check(pack.attention(name), variant, _vectors(package, variant))
    return SelfTestReport(
        digest=pack.digest, device=str(pack.device), target=str(pack.target), checks=tuple(checks)
    )


def _vectors(package: Package, variant: Variant) -> dict[str, Tensor]:
    if variant.vectors is None:
        raise InputError(
            f"the variant for {variant.target} has no golden vectors",
            remedy="build the package again with this release of aotpack",
        )
    vectors: dict[str, Tensor] = parse_vectors(package.read_blob(variant.vectors))
    return vectors


def _check(attention: Attention, variant: Variant, golden: Mapping[str, Tensor]) -> Iterator[Check]:
    found = _run(attention, golden)
    for name in found:
        error = relative_error(found[name].cpu().double(), golden[name].double())
        yield Check(spec=attention.name, what=name, error=error, tolerance=variant.tolerance[name])
    empty = golden["lse"] == -math.inf
    if bool(empty.any()):
        yield Check(spec=attention.name, what="empty rows", error=_emptiness(found, empty), tolerance=0.0)
    if attention.spec.mask.family == "dflash":
        nothing = {**golden, "mask.keep": torch.zeros_like(golden["mask.keep"])}
        error = _emptiness(_run(attention, nothing), torch.ones_like(empty))
        yield Check(spec=attention.name, what="all rows empty", error=error, tolerance=0.0)


def _run(attention: Attention, golden: Mapping[str, Tensor]) -> dict[str, Tensor]:
    here = {name: tensor.to(attention.device) for name, tensor in golden.items()}
    _, query, key = golden["lengths"].tolist()
    rule: dict[str, Any] = {
        name.removeprefix("mask."): here[name] for name in here if name.startswith("mask.")
    }
    score = {name.removeprefix("score."): here[name] for name in here if name.startswith("score.")}
    trained = [name for name in score if f"grad.score.{name}" in golden]
    drafts = family_of(attention.spec.mask).drafts
    lengths: dict[str, Any] = {"query_len": query, "context_len": key - query if drafts else key}
    q, k, v = (here[name].requires_grad_() for name in ("q", "k", "v"))
    wanted = [q, k, v, *(score[name].requires_grad_() for name in trained)]
    mask = attention.block_mask(**rule, **lengths)
    out, lse = attention(q, k, v, mask, return_lse=True, **score)
    grads = torch.autograd.grad([out, lse], wanted, [here["grad.out"], here["grad.lse"]])
    names = (*_RESULTS, *(f"grad.score.{name}" for name in trained))
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))


def _emptiness(found: Mapping[str, Tensor], empty: Tensor) -> float:
    empty = empty.to(found["lse"].device)
    if not bool((found["lse"][empty] == -math.inf).all()):
        return math.inf
    zero = [found["out"][empty], found["grad.q"][empty]]
    if bool(empty.all()):
        zero += [found["grad.k"], found["grad.v"]]
    # The norm is NaN where any value is; the maximum of a NaN and others may hide it.
    return max(float(tensor.double().norm(math.inf)) for tensor in zero if tensor.numel())
