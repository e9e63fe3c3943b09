"""What a variant's binaries need and what a machine offers: plain facts, gathered elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

__all__ = [
    "CudaDevice",
    "CudaRequirements",
    "HostFacts",
    "Kernel",
    "Requirements",
    "cpu_flags",
    "driver_floor",
    "instruction_set",
    "version",
]

_LEVELS: Final = (
    ("x86_64-v1", "cmov cx8 fpu fxsr mmx syscall sse2"),
    ("x86_64-v2", "cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3"),
    ("x86_64-v3", "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"),
    ("x86_64-v4", "avx512f avx512bw avx512cd avx512dq avx512vl"),
)
_DRIVER_FLOORS: Final = {12: "525", 13: "580"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """Facts of one GPU kernel, read from its cubin.

    Attributes:
        name: entry symbol.
        shared_memory: bytes of shared memory a block needs, static and dynamic together.
        registers: registers per thread.
        spills: bytes per thread spilled to local memory.
    """

    name: str
    shared_memory: int
    registers: int | None = None
    spills: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaRequirements:
    """What the cubins of a variant need.

    Attributes:
        capability: that they were compiled for, ``"9.0"``; ``"9.0a"`` runs on 9.0 only.
        kernels: one entry for each kernel.
        driver: lowest driver version that loads them, ``"525"``; see ``driver_floor``.
        symbols: CUDA functions that the host code imports, ``"cuLaunchKernel"``, for people only.
        ptx: version of the PTX that they were made from, ``"8.7"``, for people only: none of it is kept.
    """

    capability: str
    kernels: tuple[Kernel, ...] = ()
    driver: str | None = None
    ptx: str | None = None
    symbols: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """What a variant's binaries need, read from the binaries; None or empty is no need.

    Attributes:
        instruction_set: of the host code, ``"x86_64-v3"`` or ``"aarch64"``.
        glibc: highest ``GLIBC_x.y`` symbol version, ``"2.34"``.
        libstdcxx: highest ``GLIBCXX_x.y.z`` symbol version, ``"3.4.30"``.
        needed: ELF NEEDED entries, ``"libtorch_cpu.so"``.
        torch_symbols: imported ``aoti_torch_*`` and ``torch_*`` symbols.
        cuda: for CUDA variants.
    """

    instruction_set: str | None = None
    glibc: str | None = None
    libstdcxx: str | None = None
    needed: tuple[str, ...] = ()
    torch_symbols: tuple[str, ...] = ()
    cuda: CudaRequirements | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CudaDevice:
    """One CUDA device of a machine.

    Attributes:
        name: as the driver reports it.
        capability: compute capability, ``(9, 0)``.
        shared_memory: bytes a block may opt in to.
        driver: driver version, ``"580.95.05"``; None is not known and not compared.
    """

    name: str
    capability: tuple[int, int]
    shared_memory: int
    driver: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFacts:
    """What a machine offers. A fact that is None is not known and not compared, glibc excepted.

    Attributes:
        machine: ``platform.machine()``.
        instruction_set: highest level of the CPU, as ``instruction_set()`` gives it.
        glibc: version; None is a machine without glibc.
        libstdcxx: highest ``GLIBCXX_x.y.z`` of the libstdc++ that will be used.
        torch: version, for messages only.
        torch_symbols: symbols that the loaded torch exports; those that the variants import are enough.
        libraries: ELF NEEDED names that resolve here; those that the variants need are enough.
        cuda_devices: by CUDA index.
    """

    machine: str
    instruction_set: str | None = None
    glibc: str | None = None
    libstdcxx: str | None = None
    torch: str | None = None
    torch_symbols: frozenset[str] | None = None
    libraries: frozenset[str] | None = None
    cuda_devices: tuple[CudaDevice, ...] = ()


def cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Flags that every processor in the text of ``/proc/cpuinfo`` has."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset.intersection(*(frozenset(line.split()) for line in lines)) if lines else frozenset()


def instruction_set(machine: str, flags: Iterable[str]) -> str | None:
    """Highest x86-64 level whose flags are all there; ``"aarch64"`` for Arm; None for anything else.

    Source: the x86-64 psABI's microarchitecture levels, by the names ``/proc/cpuinfo`` uses.
    """
    if machine.lower() in ("aarch64", "arm64"):
        return "aarch64"
    present, level = frozenset(flags), None
    if machine.lower() in ("x86_64", "amd64"):
        for name, needed in _LEVELS:
            if not present.issuperset(needed.split()):
                break
            level = name
    return level


def driver_floor(cuda: str) -> str | None:
    """Lowest driver for cubins of a CUDA release: ``"13.0"`` needs ``"580"``; None is unknown."""
    return _DRIVER_FLOORS.get(version(cuda)[0])


def version(text: str) -> tuple[int, ...]:
    """The numbers of a dotted version, to compare: ``"2.34"`` is ``(2, 34)``."""
    return tuple(int(part) for part in re.findall(r"\d+", text)) or (0,)
