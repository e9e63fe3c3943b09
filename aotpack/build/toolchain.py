"""The C++ toolchain: where it is, which flags a target's host code takes, and the CPU kernels' archive."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils import cpp_extension

from aotpack.errors import BuildError, HostError

__all__ = [
    "HOST_FLAGS",
    "KERNEL_LIBRARY",
    "HostFlags",
    "compile_kernels",
    "compiler",
    "compiler_name",
    "compiler_version",
    "hide_paths",
    "tool",
]

KERNEL_LIBRARY: Final = "aotpack_kernels"
_SOURCES: Final = Path(__file__).parent / "cpu"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostFlags:
    """How host code is compiled for one instruction set: flags, and Inductor's vector width in bits."""

    name: str
    march: str
    simdlen: int | None
    capability: str

    @property
    def inductor_options(self) -> dict[str, Any]:
        """Options of AOTInductor: never -march=native, whatever machine builds."""
        return {"cpp.march": self.march, "cpp.simdlen": self.simdlen}


HOST_FLAGS: Final = {
    "x86_64-v3": HostFlags(name="x86_64-v3", march="x86-64-v3", simdlen=256, capability="AVX2"),
    "x86_64-v4": HostFlags(name="x86_64-v4", march="x86-64-v4", simdlen=512, capability="AVX512"),
    "aarch64": HostFlags(name="aarch64", march="armv8-a", simdlen=None, capability="DEFAULT"),
}


def tool(name: str) -> str:
    """Path of an executable; ``HostError`` when the machine lacks it."""
    path = shutil.which(name)
    if path is None:
        raise HostError(
            f"building needs the program '{name}', and this machine has none on its PATH",
            expected="a C++20 compiler with binutils",
            remedy="install g++ (Debian: apt-get install g++), or set CXX to another compiler",
        )
    return path


def compiler() -> str:
    """The C++ compiler: CXX when set, else g++."""
    return tool(os.environ.get("CXX", "g++"))


def compiler_version() -> str:
    """First line of the compiler's own version."""
    return subprocess.run(
        [compiler(), "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]


def compiler_name() -> str:
    """Under which name Inductor calls the compiler that ``hide_paths`` wraps."""
    return Path(compiler()).name


def hide_paths(folder: Path) -> None:
    """Wraps the compiler so that no path of ``folder`` or of torch reaches a binary: builds are reproducible.

    The wrapper is found through PATH under the compiler's own name: Inductor tells compilers apart by name
    and hashes the command.
    """
    real, wrapper = compiler(), folder / "bin" / compiler_name()
    # Torch's headers name themselves in their messages.
    packages = Path(torch.__file__).parent.parent
    hidden = [f"-ffile-prefix-map={path}=." for path in (folder, packages, packages.resolve())]
    wrapper.parent.mkdir()
    # Each part of the build compiles in a folder of its own (parallel.py).
    part = '"-ffile-prefix-map=${TORCHINDUCTOR_CACHE_DIR%/*}=."'
    wrapper.write_text(f'#!/bin/sh\nexec {shlex.quote(real)} {shlex.join(hidden)} {part} "$@"\n')
    wrapper.chmod(0o700)
    os.environ["PATH"] = os.pathsep.join([str(wrapper.parent), os.environ.get("PATH", os.defpath)])


def compile_kernels(flags: HostFlags, folder: Path) -> Path:
    """Compiles the CPU kernels into a static archive in ``folder``, for ``-l`` + KERNEL_LIBRARY."""
    # The sources are compiled under relative names in the work folder, so that no path reaches the binary.
    shutil.copytree(_SOURCES, folder, dirs_exist_ok=True)
    sources = sorted(path.name for path in _SOURCES.glob("*.cpp"))
    command = [
        compiler(), "-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden",
        "-fno-math-errno", "-fno-trapping-math",
        f"-march={flags.march}",
        f"-DCPU_CAPABILITY={flags.capability}", f"-DCPU_CAPABILITY_{flags.capability}",
        *(f"-isystem{path}" for path in cpp_extension.include_paths()), "-c", *sources,
    ]  # fmt: skip
    _checked(command, folder)
    archive = folder / f"lib{KERNEL_LIBRARY}.a"
    objects = [Path(name).with_suffix(".o").name for name in sources]
    _checked([tool("ar"), "rcD", archive.name, *objects], folder)
    return archive


def _checked(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(
            "the C++ compiler failed on the CPU kernels",
            expected="a compiler that knows C++20",
            found=done.stderr.strip()[-2000:],
            remedy="use g++ 11 or later, or clang++ 14 or later",
        )
