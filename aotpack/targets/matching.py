"""The rule that compares what a variant needs with what a machine offers: pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Generic, Protocol, TypeVar

from aotpack.errors import AotpackError, HostError, InputError, NoVariantError, TargetError
from aotpack.targets.facts import CudaDevice, CudaRequirements, HostFacts, Requirements, version
from aotpack.targets.target import Target, cubin_runs

__all__ = ["Choice", "Decision", "Reason", "choose", "match"]


class Reason(StrEnum):
    """Why a variant was accepted or refused."""

    ACCEPTED = "accepted"
    UNKNOWN_TARGET = "unknown-target"
    DEVICE_TYPE = "device-type"
    NO_DEVICE = "no-device"
    MACHINE = "machine"
    INSTRUCTION_SET = "instruction-set"
    CAPABILITY = "capability"
    SHARED_MEMORY = "shared-memory"
    DRIVER = "driver"
    GLIBC = "glibc"
    LIBSTDCXX = "libstdcxx"
    LIBRARY = "library"
    TORCH_SYMBOLS = "torch-symbols"


_MENDABLE: Final = {
    Reason.NO_DEVICE: "choose a device that this machine has",
    Reason.DRIVER: "update the NVIDIA driver",
    Reason.GLIBC: "use a system with a newer glibc, or build the package on an older one",
    Reason.LIBSTDCXX: "install a newer libstdc++",
    Reason.LIBRARY: "install the missing libraries",
    Reason.TORCH_SYMBOLS: "install a newer torch, or build the package with an older one",
}
_Objection = tuple[Reason, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether one variant runs on one device of one machine.

    Attributes:
        target: the variant's target, as the manifest names it.
        accepted: whether it runs.
        code: the first reason against it, or ``Reason.ACCEPTED``.
        reason: the same for people, without the target's name.
    """

    target: str
    accepted: bool
    code: Reason
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.reason} [{self.code}]"


class Candidate(Protocol):
    """What ``choose`` asks of a variant."""

    @property
    def target(self) -> str: ...

    @property
    def requires(self) -> Requirements: ...


V = TypeVar("V", bound=Candidate)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Generic[V]):
    """The variant to run, and the decision about each variant in the order they were given."""

    variant: V
    decisions: tuple[Decision, ...]


def match(requirements: Requirements, target: str, host: HostFacts, device: str) -> Decision:
    """Decide whether a variant runs; looks at nothing but its arguments.

    Args:
        requirements: facts read from the variant's binaries.
        target: its target's name; a name this release does not know is refused, not an error.
        host: facts of the machine.
        device: ``"cpu"``, ``"cuda"`` (the first device) or ``"cuda:N"``.

    Raises:
        InputError: for any other device.
    """
    kind, index = _parse_device(device)
    parsed = next((known for known in Target.known() if str(known) == target), None)
    if parsed is None:
        objection: _Objection | None = (Reason.UNKNOWN_TARGET, "this aotpack does not know the target")
    else:
        objection = next(_objections(requirements, parsed, host, kind, index), None)
    if objection is None:
        return Decision(target=target, accepted=True, code=Reason.ACCEPTED, reason="runs here")
    return Decision(target=target, accepted=False, code=objection[0], reason=objection[1])


def choose(variants: Sequence[V], host: HostFacts, device: str) -> Choice[V]:
    """Take the variant with the tightest target among those that run: v4 before v3, 8.9 before 8.0.

    Raises:
        NoVariantError: none runs here; the message has every variant with its reason.
        HostError: none runs here, and at least one would if the machine had another driver, glibc or torch.
        InputError: for a device other than ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    """
    decisions = tuple(match(v.requires, v.target, host, device) for v in variants)
    running = [v for v, decision in zip(variants, decisions, strict=True) if decision.accepted]
    if not running:
        raise _refusal(decisions, host, device)
    return Choice(variant=max(running, key=_tightness), decisions=decisions)


def _parse_device(device: str) -> tuple[str, int]:
    found = re.fullmatch(r"(cpu)|cuda(?::([0-9]{1,4}))?", device)
    if found is None:
        raise InputError(f"unknown device {device!r}", expected="cpu, cuda or cuda:N")
    return ("cpu", 0) if found[1] else ("cuda", int(found[2] or 0))


def _tightness(variant: Candidate) -> tuple[int, bool]:
    names = [str(target) for target in Target.known()]
    cuda = variant.requires.cuda
    return names.index(variant.target), cuda is not None and cuda.capability.endswith("a")


def _objections(
    needs: Requirements, target: Target, host: HostFacts, kind: str, index: int
) -> Iterator[_Objection]:
    if target.device != kind:
        yield Reason.DEVICE_TYPE, f"built for {target.device}, and {kind} was asked for"
    yield from _host_code(needs, target, host)
    if kind == "cuda":
        yield from _device_code(needs.cuda, target, host, index)
    yield from _libraries(needs, host)


def _host_code(needs: Requirements, target: Target, host: HostFacts) -> Iterator[_Objection]:
    has = host.instruction_set or host.machine
    host_family, _, host_level = has.partition("-v")
    for need in filter(None, (needs.instruction_set, target.arch if target.device == "cpu" else None)):
        family, _, level = need.partition("-v")
        if family != host_family:
            yield Reason.MACHINE, f"built for {family} machines, this one is {host_family}"
        elif level and host_level and int(level) > int(host_level):
            yield Reason.INSTRUCTION_SET, f"needs {need} instructions, this CPU has {has}"


def _device_code(
    needs: CudaRequirements | None, target: Target, host: HostFacts, index: int
) -> Iterator[_Objection]:
    if index >= len(host.cuda_devices):
        yield (
            Reason.NO_DEVICE,
            f"needs CUDA device {index}, this machine has {len(host.cuda_devices)} of them",
        )
        return
    device = host.cuda_devices[index]
    yield from _capability(needs, target, device)
    if needs is None:
        return
    for kernel in needs.kernels:
        if kernel.shared_memory > device.shared_memory:
            need = f"{kernel.shared_memory} bytes of shared memory a block"
            has = f"{device.name} has {device.shared_memory}"
            yield Reason.SHARED_MEMORY, f"kernel {kernel.name} needs {need}, {has}"
    if needs.driver and device.driver and version(device.driver) < version(needs.driver):
        yield Reason.DRIVER, f"needs driver {needs.driver} or newer, this machine has {device.driver}"


def _capability(needs: CudaRequirements | None, target: Target, device: CudaDevice) -> Iterator[_Objection]:
    built, suffix = target.capability or (0, 0), ""
    if needs is not None:
        major, minor, suffix = re.findall(r"(\d+)\.(\d+)([a-z]?)", needs.capability)[0]
        built = int(major), int(minor)
    if not cubin_runs(built, suffix, device.capability):
        has = ".".join(map(str, device.capability))
        yield (
            Reason.CAPABILITY,
            (f"built for capability {built[0]}.{built[1]}{suffix}, {device.name} has {has}"),
        )


def _libraries(needs: Requirements, host: HostFacts) -> Iterator[_Objection]:
    if needs.glibc and (host.glibc is None or version(host.glibc) < version(needs.glibc)):
        yield Reason.GLIBC, f"needs glibc {needs.glibc} or newer, this machine has {host.glibc or 'none'}"
    if needs.libstdcxx and host.libstdcxx and version(host.libstdcxx) < version(needs.libstdcxx):
        need, has = needs.libstdcxx, host.libstdcxx
        yield Reason.LIBSTDCXX, f"needs libstdc++ with GLIBCXX_{need}, this machine's ends at {has}"
    if missing := _missing(needs.needed, host.libraries):
        yield Reason.LIBRARY, f"needs libraries that are not here: {missing}"
    if missing := _missing(needs.torch_symbols, host.torch_symbols):
        yield Reason.TORCH_SYMBOLS, f"torch {host.torch or '(version unknown)'} lacks {missing}"


def _missing(needed: Sequence[str], present: frozenset[str] | None) -> str:
    if present is None:
        return ""
    absent = [name for name in needed if name not in present]
    rest = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
    return ", ".join(absent[:3]) + rest


def _refusal(decisions: Sequence[Decision], host: HostFacts, device: str) -> AotpackError:
    found = "".join(f"\n    {decision}" for decision in decisions) or "no variant at all"
    expected = f"a variant for {_describe(host, device)}"
    remedies = [text for code, text in _MENDABLE.items() if code in {d.code for d in decisions}]
    if remedies:
        problem = f"no variant runs on {device}, but one would if this machine were changed"
        return HostError(problem, expected=expected, found=found, remedy="; or ".join(remedies))
    remedy = f"build the package with {_build_option(host, device)} as well"
    return NoVariantError(f"no variant runs on {device}", expected=expected, found=found, remedy=remedy)


def _describe(host: HostFacts, device: str) -> str:
    kind, index = _parse_device(device)
    machine = host.instruction_set or host.machine
    if kind == "cpu" or index >= len(host.cuda_devices):
        return f"{device} ({machine})"
    cuda = host.cuda_devices[index]
    return f"{device} ({cuda.name}, capability {cuda.capability[0]}.{cuda.capability[1]}, on {machine})"


def _build_option(host: HostFacts, device: str) -> str:
    kind, index = _parse_device(device)
    capability = host.cuda_devices[index].capability if index < len(host.cuda_devices) else None
    try:
        return f"--target {Target.parse(kind, machine=host.machine, capability=capability)}"
    except TargetError:
        return "a target for this machine"
