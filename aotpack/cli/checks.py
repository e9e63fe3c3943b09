"""What ``aotpack doctor`` looks at: each check says what was found and what to do about a problem."""

from __future__ import annotations

import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from aotpack.cli.hostfile import LIBRARIES
from aotpack.errors import AotpackError
from aotpack.store import Store
from aotpack.targets import HostFacts, Target

__all__ = ["BUILDERS", "Check", "examine", "facts"]

_BINUTILS: Final = ("ar", "nm", "objdump", "readelf", "strip")
_PACKAGES: Final = ("transformers", "safetensors", "zstandard")
# As in aotpack.build.worker, whose import takes seconds and leaves Inductor's folder in the temp folder.
BUILDERS: Final = ("2.13", "2.14")
_FREE: Final = 1 << 26


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One line of the examination.

    Attributes:
        name: what was looked at.
        found: what is there.
        needed_for: ``"load"`` where a problem keeps packages from running here, ``"build"`` where it only
            keeps this machine from building them.
        remedy: what to do; None is no problem.
    """

    name: str
    found: str
    needed_for: Literal["load", "build"] = "load"
    remedy: str | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return self.remedy is None


def examine() -> Iterator[Check]:
    """Every check, in the order in which they are printed."""
    yield _python()
    yield _torch()
    yield from _packages()
    host = facts()
    if host is not None:
        yield _cpu(host)
        yield _glibc(host)
        yield _cuda(host)
    yield _folder("cache folder", _cache_root, "load", "set AOTPACK_CACHE to a writable local folder")
    yield _builder_torch()
    yield _compiler()
    yield _binutils()
    yield _folder("temp folder", lambda: Path(tempfile.gettempdir()), "build", "set TMPDIR to another folder")


def facts(*, whole: bool = False) -> HostFacts | None:
    """Facts of this machine; None without a working torch.

    ``whole`` looks for all symbols and libraries that any package may need.
    """
    try:
        from aotpack.runtime.host import host_facts, known_symbols

        return host_facts(symbols=known_symbols(), libraries=LIBRARIES) if whole else host_facts()
    except (ImportError, OSError):
        return None


def _python() -> Check:
    remedy = None if sys.version_info >= (3, 11) else "use Python 3.11 or newer"
    return Check(
        name="python", found=f"{platform.python_version()} ({sys.implementation.name})", remedy=remedy
    )


def _torch() -> Check:
    try:
        import torch
    except (ImportError, OSError) as error:
        return Check(
            name="torch", found=f"cannot be imported: {error}", remedy="pip install 'torch>=2.11,<2.15'"
        )
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    tried = (2, 11) <= release < (2, 15)
    return Check(
        name="torch", found=torch.__version__, remedy=None if tried else "pip install 'torch>=2.11,<2.15'"
    )


def _packages() -> Iterator[Check]:
    for name in _PACKAGES:
        try:
            yield Check(name=name, found=version(name))
        except PackageNotFoundError:
            needed_for: Literal["load", "build"] = "build" if name == "transformers" else "load"
            yield Check(name=name, found="not installed", needed_for=needed_for, remedy=f"pip install {name}")


def _cpu(host: HostFacts) -> Check:
    try:
        target = Target.parse("cpu", machine=host.machine)
    except AotpackError as error:
        return Check(name="cpu", found=host.machine, remedy=f"use {error.expected}")
    has = host.instruction_set or host.machine
    family, _, level = target.arch.partition("-v")
    enough = has.startswith(family) and int(has.partition("-v")[2] or 0) >= int(level or 0)
    found = f"{has}, {os.cpu_count()} processors"
    remedy = None if enough else f"use a machine with at least {target.arch} instructions for CPU packages"
    return Check(name="cpu", found=found, remedy=remedy)


def _glibc(host: HostFacts) -> Check:
    remedy = None if host.glibc else "use a Linux with glibc; musl is not supported"
    return Check(name="glibc", found=host.glibc or "none", remedy=remedy)


def _cuda(host: HostFacts) -> Check:
    found = [f"{d.name} ({d.capability[0]}.{d.capability[1]})" for d in host.cuda_devices]
    return Check(name="cuda devices", found=", ".join(found) or "none; CPU packages only")


def _cache_root() -> Path:
    return Store().root


def _folder(name: str, find: Callable[[], Path], needed_for: Literal["load", "build"], remedy: str) -> Check:
    """Whether files can be made and run there; nothing is written to find out."""
    try:
        path = find()
    except (AotpackError, OSError) as error:
        return Check(name=name, found=str(error).splitlines()[0], needed_for=needed_for, remedy=remedy)
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    problem = _problem(there)
    found = f"{path}: {problem}" if problem else str(path)
    return Check(name=name, found=found, needed_for=needed_for, remedy=remedy if problem else None)


def _problem(folder: Path) -> str | None:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{folder} is not writable"
    file_system = os.statvfs(folder)
    if file_system.f_flag & os.ST_RDONLY:
        return "on a read-only file system"
    if file_system.f_flag & os.ST_NOEXEC:
        return "on a file system that is mounted noexec"
    free = file_system.f_bavail * file_system.f_frsize
    return None if free >= _FREE else f"only {free >> 20} MiB are free"


def _builder_torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check(
            name="torch to build with", found="none", needed_for="build", remedy="install torch 2.14"
        )
    found = version("torch")
    remedy = (
        None if found.startswith(BUILDERS) else f"build in an environment with torch {' or '.join(BUILDERS)}"
    )
    return Check(name="torch to build with", found=found, needed_for="build", remedy=remedy)


def _compiler() -> Check:
    _hush_cuda_search()
    try:
        from aotpack.build.toolchain import compiler, compiler_version

        path, found = compiler(), compiler_version()
        command = [path, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
        done = subprocess.run(command, input="#include <span>\n", capture_output=True, text=True, check=False)
    except AotpackError as error:
        return Check(name="compiler", found=error.problem, needed_for="build", remedy=error.remedy)
    except (ImportError, OSError, subprocess.SubprocessError) as error:
        remedy = "install g++ 11 or later, or clang++ 14 or later"
        return Check(name="compiler", found=str(error), needed_for="build", remedy=remedy)
    remedy = "" if done.returncode == 0 else "use g++ 11 or later, or clang++ 14 or later"
    return Check(name="compiler", found=found, needed_for="build", remedy=remedy or None)


def _hush_cuda_search() -> None:
    # The import logs that there is no CUDA toolkit, which no build needs.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _binutils() -> Check:
    missing = [name for name in _BINUTILS if shutil.which(name) is None]
    if missing:
        found, remedy = f"no {', '.join(missing)}", "install binutils (Debian: apt-get install binutils)"
        return Check(name="binutils", found=found, needed_for="build", remedy=remedy)
    return Check(name="binutils", found=", ".join(_BINUTILS), needed_for="build")
