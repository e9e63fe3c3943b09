"""Device types that aotpack compiles for: parse and print."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Final

from aotpack.errors import TargetError

__all__ = ["Target", "cubin_runs"]

_CPU_ARCHS: Final = ("x86_64-v3", "x86_64-v4", "aarch64")
_CUDA_ARCHS: Final = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
_MACHINES: Final = {"x86_64": "x86_64-v3", "amd64": "x86_64-v3", "aarch64": "aarch64", "arm64": "aarch64"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A device type that a variant is compiled for; prints as ``cpu-x86_64-v3`` or ``cuda-sm90``.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        arch: ``"x86_64-v3"``, ``"aarch64"``, ``"sm90"`` and the like.
    """

    device: str
    arch: str

    def __post_init__(self) -> None:
        if str(self) not in _names():
            raise _unknown_target(str(self))

    def __str__(self) -> str:
        return f"{self.device}-{self.arch}"

    @property
    def capability(self) -> tuple[int, int] | None:
        """CUDA compute capability, ``(9, 0)`` for ``sm90``; None for a CPU."""
        if self.device != "cuda":
            return None
        digits = self.arch.removeprefix("sm")
        return int(digits[:-1]), int(digits[-1])

    @classmethod
    def known(cls) -> tuple[Target, ...]:
        """Every target there is."""
        return tuple(cls(device=n.partition("-")[0], arch=n.partition("-")[2]) for n in _names())

    @classmethod
    def parse(
        cls, text: str, *, machine: str | None = None, capability: tuple[int, int] | None = None
    ) -> Target:
        """Read a target's name.

        Args:
            text: a full name, or ``"cpu"`` or ``"cuda"`` for the default of a machine.
            machine: ``platform.machine()`` of it, this one when not given. The default of an ``x86_64``
                machine is ``cpu-x86_64-v3``, which other machines run too, whatever this one could do.
            capability: of the CUDA device, which ``"cuda"`` needs.

        Raises:
            TargetError: for an unknown name, or a machine or capability without a target.
        """
        if text == "cpu":
            return cls._for_cpu(platform.machine() if machine is None else machine)
        if text == "cuda":
            return cls._for_cuda(capability)
        device, _, arch = text.partition("-")
        return cls(device=device, arch=arch)

    @classmethod
    def _for_cpu(cls, machine: str) -> Target:
        if (arch := _MACHINES.get(machine.lower())) is None:
            raise _unknown_target("cpu", f"a machine of type {machine or 'unknown'}")
        return cls(device="cpu", arch=arch)

    @classmethod
    def _for_cuda(cls, capability: tuple[int, int] | None) -> Target:
        if capability is None:
            raise _unknown_target("cuda", "no CUDA device on this machine")
        for target in reversed(cls.known()):
            if target.capability and cubin_runs(target.capability, "", capability):
                return target
        raise _unknown_target("cuda", f"a device of capability {capability[0]}.{capability[1]}")


def cubin_runs(built: tuple[int, int], suffix: str, device: tuple[int, int]) -> bool:
    """Whether a cubin for capability ``built`` runs on ``device``.

    X.y runs on X.z with z >= y and on no other major; with suffix ``a`` on exactly that capability.
    """
    if suffix == "a":
        return built == device
    return built[0] == device[0] and built[1] <= device[1]


def _names() -> list[str]:
    return [*(f"cpu-{arch}" for arch in _CPU_ARCHS), *(f"cuda-{arch}" for arch in _CUDA_ARCHS)]


def _unknown_target(name: str, found: str | None = None) -> TargetError:
    return TargetError(
        f"unknown target {name!r}" if found is None else f"{name!r} alone names no target here",
        expected=f"one of {', '.join(_names())}",
        found=found,
        remedy="name the target in full",
    )
