"""AOTInductor: from a graph to a stripped shared library.

Touches ``torch._inductor``. Tried with torch 2.13.0 and 2.14.1: ``aot_compile`` with the
options below; ``aot_inductor.custom_ops_to_c_shims`` and ``custom_op_libs`` link the CPU kernels in;
``cpu_vec_isa.valid_vec_isa_list`` decides the vector instructions of generated code.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch._inductor
from torch import fx
from torch._inductor import cpu_vec_isa
from torch._inductor.runtime.cache_dir_utils import cache_dir

from aotpack.build import elf
from aotpack.build.export import Graph
from aotpack.build.ops import C_SHIMS
from aotpack.build.toolchain import KERNEL_LIBRARY, HostFlags, compiler_name
from aotpack.errors import BuildError

__all__ = ["FUSE_THE_RULE", "compile_cpu", "host_options", "vector_instructions"]

# Inductor gives an expression of many operations or reads a buffer of its own: for a mask's rule that is a
# byte for every cell of the grid. These keep the rule inside the loops that use it.
FUSE_THE_RULE: Final[dict[str, Any]] = {
    "realize_opcount_threshold": 1 << 20,
    "realize_reads_threshold": 1 << 20,
    "realize_acc_reads_threshold": 1 << 20,
}


def compile_cpu(graph: Graph, flags: HostFlags, *, fused: bool = False) -> Path:
    """Compiles a CPU graph; the library is stripped.

    Our kernels are linked into a graph that calls one; their archive must be on LIBRARY_PATH.

    Args:
        graph: of one program.
        flags: of the target.
        fused: never evaluates what a loop uses into a buffer: for a mask's rule.
    """
    options = host_options(flags, "program", graph.module)
    if any(node.target in C_SHIMS for node in graph.module.graph.nodes):
        options["aot_inductor.custom_ops_to_c_shims"] = C_SHIMS
        options["aot_inductor.custom_op_libs"] = [KERNEL_LIBRARY]
    if fused:
        options |= FUSE_THE_RULE
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with vector_instructions(flags):
        library = torch._inductor.aot_compile(graph.module, graph.args, options=options)
    if not isinstance(library, str):
        raise BuildError("AOTInductor returned no shared library", expected="one path", found=repr(library))
    elf.strip(Path(library))
    return Path(library)


def host_options(flags: HostFlags, name: str, module: fx.GraphModule) -> dict[str, Any]:
    """Options of AOTInductor for small and reproducible host code.

    Args:
        flags: of the target.
        name: begins the names of the kernels.
        module: what is compiled.
    """
    return {
        **flags.inductor_options,
        "aot_inductor.output_path": _folder(name, module),
        "cpp.cxx": (None, compiler_name()),
        "cpp.dynamic_threads": True,
        # How many loops become one parallel loop; left alone, it follows from the building machine's cores.
        "cpp.threads": 16,
        "compile_threads": 1,
        # One header cache for each set of flags costs more than the three programs save by it.
        "aot_inductor.precompile_headers": False,
        "cpp_cache_precompile_headers": False,
        "aot_inductor.enable_line_tables": False,
        "aot_inductor.enable_frame_pointer": False,
        "aot_inductor.repro_level": 0,
        "aot_inductor.model_name_for_generated_files": name,
    }


def _folder(name: str, module: fx.GraphModule) -> str:
    """A folder for what is compiled, the same for the same module: its name may reach the binaries.

    Left to itself, torch names it after the graph without its subgraphs, and a program whose mask alone
    differs from an earlier one's would get that one's code.
    """
    parts = [f"{at}:{part.code}" for at, part in module.named_modules() if isinstance(part, fx.GraphModule)]
    digest = hashlib.sha256("\n".join([name, *parts]).encode()).hexdigest()
    folder = Path(cache_dir(), f"program-{digest[:32]}")
    folder.mkdir(exist_ok=True)
    return str(folder)


@contextlib.contextmanager
def vector_instructions(flags: HostFlags) -> Iterator[None]:
    """Generated code uses the target's vector instructions, whatever the building machine has.

    Left alone, Inductor takes the widest set of the machine it runs on (AMX counts as 512 bits), and
    compiles a probe for each.
    """
    chosen, found = _ISA[flags.capability](), cpu_vec_isa.valid_vec_isa_list
    vars(cpu_vec_isa)["valid_vec_isa_list"] = lambda: [chosen]
    try:
        yield
    finally:
        vars(cpu_vec_isa)["valid_vec_isa_list"] = found


class _Avx2(cpu_vec_isa.VecAVX2):
    def __bool__(self) -> bool:
        return True


class _Avx512(cpu_vec_isa.VecAVX512):
    # VecAVX512's own test also adds bfloat16 instructions, which x86-64-v4 does not have.
    def __bool__(self) -> bool:  # type: ignore[override]
        return True


class _Neon(cpu_vec_isa.VecNEON):
    def __bool__(self) -> bool:
        return True


_ISA: Final = {"AVX2": _Avx2, "AVX512": _Avx512, "DEFAULT": _Neon}
