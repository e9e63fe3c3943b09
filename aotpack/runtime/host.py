"""Facts of this machine and this process, for the decision which variant runs."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, Final

import torch

from aotpack.targets import CudaDevice, HostFacts, cpu_flags, instruction_set
from aotpack.targets.facts import version

__all__ = ["host_facts", "known_symbols"]

# The kernel module's own line; NVML would take longer to start than everything else here together.
_DRIVER: Final = Path("/proc/driver/nvidia/version")
_TORCH_LIBRARIES: Final = ("libtorch_cpu.so", "libtorch_cuda.so")
_VERSION_DEFINITIONS: Final = 0x6FFFFFFD


def known_symbols() -> frozenset[str]:
    """Every symbol that this torch declares for compiled programs, by its own headers."""
    root = Path(torch.__file__).parent / "include" / "torch" / "csrc"
    folders = (root / "inductor" / "aoti_torch", root / "stable" / "c")
    headers = [path.read_text(errors="replace") for f in folders for path in sorted(f.glob("**/*.h"))]
    return frozenset(re.findall(r"\b(?:aoti_)?torch_\w+(?=\()", "\n".join(headers)))


def host_facts(*, symbols: Iterable[str] = (), libraries: Iterable[str] = ()) -> HostFacts:
    """What this machine offers; ``symbols`` and ``libraries`` are the names to look for."""
    machine = platform.machine()
    flags = cpu_flags(Path("/proc/cpuinfo").read_text()) if Path("/proc/cpuinfo").exists() else frozenset()
    return HostFacts(
        machine=machine,
        instruction_set=instruction_set(machine, flags),
        glibc=_glibc(),
        libstdcxx=_libstdcxx(),
        torch=torch.__version__,
        torch_symbols=_present_symbols(symbols),
        libraries=frozenset(name for name in libraries if _resolves(name)),
        cuda_devices=_cuda_devices(),
    )


def _glibc() -> str | None:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").removeprefix("glibc ") or None
    except (ValueError, OSError):
        return None


@functools.cache
def _libstdcxx() -> str | None:
    """The highest version that the C++ library of this process defines, ``"3.4.30"``."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = re.search(r"\s(/\S*/libstdc\+\+\.so\.6\S*)$", maps, re.MULTILINE)
        names = _version_names(Path(path[1])) if path else b""
    except (OSError, ValueError, struct.error):
        return None
    versions = re.findall(rb"\0GLIBCXX_(\d+\.\d+(?:\.\d+)?)(?=\0)", names)
    return max(versions, key=lambda v: version(v.decode()), default=b"").decode() or None


def _version_names(path: Path) -> bytes:
    """The string table of a 64-bit library's version definitions: an eighth of libstdc++.

    Source: the ELF-64 object file format; section headers are name, type, flags, address, offset, size, link.

    Raises:
        OSError, ValueError, struct.error: it cannot be read, or has none.
    """
    with path.open("rb") as file:
        (start,), (size, count) = _unpacked("<Q", file, 0x28), _unpacked("<HH", file, 0x3A)
        sections = [_unpacked("<IIQQQQI", file, start + index * size) for index in range(count)]
        link = next((section[6] for section in sections if section[1] == _VERSION_DEFINITIONS), count)
        if link >= count:
            raise ValueError(f"{path} defines no versions")
        file.seek(sections[link][4])
        return file.read(sections[link][5])


def _unpacked(form: str, file: BinaryIO, offset: int) -> tuple[int, ...]:
    file.seek(offset)
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _present_symbols(names: Iterable[str]) -> frozenset[str]:
    loaded = [library for name in _TORCH_LIBRARIES if (library := _open_loaded(name)) is not None]
    return frozenset(name for name in names if any(hasattr(library, name) for library in loaded))


def _open_loaded(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return None


def _resolves(name: str) -> bool:
    # Libraries of torch and of the process are loaded already; others are found by the dynamic linker's
    # own search, which opening them is the only way to ask.
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _cuda_devices() -> tuple[CudaDevice, ...]:
    if not torch.cuda.is_available():
        return ()
    driver = _driver()
    return tuple(_cuda_device(index, driver) for index in range(torch.cuda.device_count()))


def _driver() -> str | None:
    try:
        text = _DRIVER.read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?\s(\d+\.\d[\d.]*)\s", text)
    return found[1] if found else None


def _cuda_device(index: int, driver: str | None) -> CudaDevice:
    properties: Any = torch.cuda.get_device_properties(index)
    return CudaDevice(
        driver=driver,
        name=properties.name,
        capability=(properties.major, properties.minor),
        shared_memory=properties.shared_memory_per_block_optin,
    )
