"""What a compiled program needs, read from its library and its cubins, as the worker reports it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from aotpack.build import elf
from aotpack.build.cubin import Cubin
from aotpack.build.export import Graph
from aotpack.build.toolchain import HostFlags
from aotpack.errors import BuildError

__all__ = ["cubin_facts", "library_facts"]


def library_facts(program: str, graph: Graph, library: Path, flags: HostFlags) -> dict[str, Any]:
    """Facts of a program's library, and its calling convention.

    Raises:
        BuildError: the host code holds instructions that its target lacks.
    """
    if flags.simdlen == 256 and elf.uses_zmm(library):
        raise BuildError(
            f"the {program} program uses 512-bit registers, which its target lacks",
            expected=f"host code for {flags.march}",
            remedy="check CXX and CXXFLAGS for an option like -march",
        )
    symbols = elf.imported_symbols(library)
    return {
        "name": program,
        "library": str(library),
        "inputs": graph.inputs,
        "outputs": graph.outputs,
        "instruction_set": flags.name,
        "glibc": elf.symbol_version(library, "GLIBC"),
        "libstdcxx": elf.symbol_version(library, "GLIBCXX"),
        "needed": elf.needed(library),
        "torch_symbols": [s for s in symbols if s.startswith(("aoti_torch_", "torch_"))],
        "cuda_symbols": [s for s in symbols if re.match("cu(da)?[A-Z]", s)],
    }


def cubin_facts(cubins: Iterable[Cubin]) -> dict[str, Any]:
    """Facts of the cubins that a program's library loads."""
    return {
        "cubins": [
            {
                "path": str(each.path),
                "capability": each.capability,
                "toolkit": each.toolkit,
                "ptx": each.ptx,
                "kernels": [
                    {
                        "name": kernel.name,
                        "shared_memory": kernel.shared_memory,
                        "registers": kernel.registers,
                        "spills": kernel.spills,
                    }
                    for kernel in each.kernels
                ],
            }
            for each in cubins
        ]
    }
