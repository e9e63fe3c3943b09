"""AOTInductor for a CUDA device that is absent: from a graph to a stripped library and its cubins.

Runs inside ``absent_device``. Tried with torch 2.14.1: ``aot_compile`` with the options below, and
``CudaKernelParamCache``, from which the library's launches take their shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch._inductor.codecache import CudaKernelParamCache

from aotpack.build import cubin, elf
from aotpack.build.absent import DeviceType
from aotpack.build.compile import FUSE_THE_RULE, host_options, vector_instructions
from aotpack.build.export import Graph
from aotpack.build.guards import count_guards, undeclared_guards
from aotpack.build.launch import split_descriptors, warp_specialised
from aotpack.build.move import to_cuda
from aotpack.build.templates import sizes_in_score_graphs, unchecked_full_blocks
from aotpack.build.toolchain import HostFlags
from aotpack.errors import BuildError

__all__ = ["CompiledCuda", "SharedMemoryError", "check_shared_memory", "compile_cuda"]


class SharedMemoryError(BuildError):
    """A kernel needs more shared memory than its device type has: compile it with smaller tiles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompiledCuda:
    """A program's library, the cubins it loads and what they need."""

    library: Path
    cubins: tuple[cubin.Cubin, ...]


def compile_cuda(
    graph: Graph,
    flags: HostFlags,
    device: DeviceType,
    *,
    name: str,
    narrow: bool = False,
    strict: bool = True,
) -> CompiledCuda:
    """Compiles a CPU graph for ``device``.

    Args:
        graph: as traced; it is moved to CUDA in place.
        flags: of the host code.
        device: what the kernels are for.
        name: begins the kernels' names.
        narrow: index with 32 bits; the caller vouches that no tensor has more elements than that.
        strict: fail when Inductor takes something for granted about the sizes.

    Raises:
        SharedMemoryError: a kernel needs more of it than the device has.
        BuildError: the program would not be right for all the sizes that it is declared for.
    """
    known = count_guards(graph)
    moved = to_cuda(graph)
    options: dict[str, Any] = {
        **host_options(flags, name, moved.module),
        "aot_inductor.package": True,
        # Flex attention's kernels take each row of the log-sum-exp to follow the last; padded, it would not.
        "comprehensive_padding": False,
        # Defines the kernels while compiling; absent_device sees to it that none is run.
        "triton.autotune_at_compile_time": True,
        "assume_32bit_indexing": narrow,
        **FUSE_THE_RULE,
        # It runs what is constant, such as the number in a where, on the device that is not there.
        "joint_graph_constant_folding": False,
        "split_reductions": False,
    }
    CudaKernelParamCache.cache_clear()
    with (
        vector_instructions(flags),
        unchecked_full_blocks(),
        sizes_in_score_graphs(),
        split_descriptors(),
        warp_specialised(),
    ):
        made: Any = torch._inductor.aot_compile(moved.module, moved.args, options=options)
    libraries = [Path(str(path)) for path in made if str(path).endswith(".so")]
    if len(libraries) != 1:
        raise BuildError("AOTInductor returned no shared library", expected="one .so", found=repr(made))
    if strict and (assumed := undeclared_guards(graph, known, narrow=narrow)):
        raise BuildError(
            f"{name} would not be right for all the sizes that it is declared for",
            expected="code for any size",
            found="; ".join(assumed),
            remedy="report this spec",
        )
    elf.strip(libraries[0])
    cubins = _cubins()
    _check_names(cubins, libraries[0])
    _check_capability(cubins, device)
    check_shared_memory(cubins, device)
    return CompiledCuda(library=libraries[0], cubins=cubins)


def _cubins() -> tuple[cubin.Cubin, ...]:
    return tuple(
        cubin.read(
            Path(saved["runtime_bin_path"]), ptx=saved["ptx"], dynamic_shared_memory=saved["shared_mem"]
        )
        for saved in CudaKernelParamCache.cache.values()
    )


def _check_names(cubins: Iterable[cubin.Cubin], library: Path) -> None:
    asked = {name.decode() for name in re.findall(rb"\w+\.cubin", library.read_bytes())}
    if asked != (made := {each.path.name for each in cubins}):
        raise BuildError(
            f"{library.name} loads other cubins than were compiled for it",
            expected=", ".join(sorted(made)),
            found=", ".join(sorted(asked)),
            remedy="report this",
        )


def _check_capability(cubins: Iterable[cubin.Cubin], device: DeviceType) -> None:
    wanted = ".".join(map(str, device.capability))
    for each in cubins:
        if each.capability.rstrip("af") != wanted:
            raise BuildError(
                f"{each.path.name} was compiled for another device type",
                expected=wanted,
                found=each.capability,
                remedy="report this",
            )


def check_shared_memory(cubins: Iterable[cubin.Cubin], device: DeviceType) -> None:
    """Raises ``SharedMemoryError`` for the first kernel that needs more than a block may have."""
    for each in cubins:
        for kernel in each.kernels:
            if kernel.shared_memory > device.shared_memory:
                raise SharedMemoryError(
                    f"kernel {kernel.name} needs more shared memory than its device type has",
                    expected=f"at most {device.shared_memory} bytes a block",
                    found=f"{kernel.shared_memory} bytes",
                    remedy="report this spec",
                )
