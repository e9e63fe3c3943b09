"""The part of a CUDA toolkit that host code is compiled with: headers from Python packages, and a libcuda."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from aotpack.build.toolchain import compiler
from aotpack.errors import HostError

__all__ = ["DRIVER_SYMBOLS", "make_toolkit"]

# The driver functions that AOTInductor's host code may call. libcuda must define each one that is called, or
# the linker drops it from the library's needs, which then fails on the node with an undefined symbol.
DRIVER_SYMBOLS: Final = (
    "cuDeviceGet",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
    "cuModuleGetFunction",
    "cuModuleLoad",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuTensorMapEncodeTiled",
)


def make_toolkit(folder: Path) -> Path:
    """A CUDA_HOME below ``folder``, made once; it never holds an nvcc.

    Raises:
        HostError: nvidia-cuda-cccl is not installed.
    """
    home = folder / "cuda"
    if not home.exists():
        headers, target = _headers()
        include, libraries = home / "include", home / "lib64"
        include.mkdir(parents=True)
        libraries.mkdir()
        for path in (*headers.iterdir(), target):
            (include / path.name).symlink_to(path)
        _make_driver(libraries)
    return home


def _headers() -> tuple[Path, Path]:
    """Triton's CUDA headers have all that is needed but ``<nv/target>``."""
    import triton

    packages = Path(triton.__file__).parent.parent
    target = next((packages / "nvidia").glob("cu*/include/nv/target"), None)
    if target is None:
        raise HostError(
            "building for CUDA devices needs headers that are not installed",
            expected="nv/target of the package nvidia-cuda-cccl",
            remedy="pip install 'aotpack[cuda]'",
        )
    return packages / "triton" / "backends" / "nvidia" / "include", target.parent


def _make_driver(folder: Path) -> None:
    source = "".join(f"int {name}(void) {{ return 0; }}\n" for name in DRIVER_SYMBOLS)
    library = folder / "libcuda.so"
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), "-xc", "-"],
        input=source.encode(),
        check=True,
        capture_output=True,
    )
