"""One spec for one CUDA device type: a block-mask program, and attention in each specialisation."""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from aotpack.build.absent import DEVICES, absent_device
from aotpack.build.compile_cuda import compile_cuda
from aotpack.build.export import Graph, differentiate, export
from aotpack.build.facts import cubin_facts, library_facts
from aotpack.build.programs_cuda import SPECIALISATIONS, Specialisation, attention_program, block_mask_program
from aotpack.build.toolchain import HOST_FLAGS
from aotpack.spec import AttentionSpec
from aotpack.targets import Target

__all__ = ["cuda_programs"]

_Stage = Callable[[str, str], AbstractContextManager[None]]


def cuda_programs(
    name: str, spec: AttentionSpec, target: Target, folder: Path, stage: _Stage
) -> list[dict[str, Any]]:
    """Compiles a spec's programs; returns their facts.

    Args:
        name: of the spec, for progress.
        spec: what to compile.
        target: a CUDA device type.
        folder: of the build; must be on LIBRARY_PATH.
        stage: reports a stage, named by its program, and the spec's name.
    """
    programs = [_program("block_mask", None, export(block_mask_program(spec)), target, folder, stage, name)]
    for kind in SPECIALISATIONS:
        with stage(f"export {kind.name}", name):
            forward, backward = differentiate(attention_program(spec, kind, {}))
        for program, graph in (("forward", forward), ("backward", backward)):
            programs.append(_program(program, kind, graph, target, folder, stage, name))
    return programs


def _program(
    program: str,
    kind: Specialisation | None,
    graph: Graph,
    target: Target,
    folder: Path,
    stage: _Stage,
    spec: str,
) -> dict[str, Any]:
    flags = HOST_FLAGS["aarch64" if platform.machine() == "aarch64" else "x86_64-v3"]
    assert target.capability is not None
    device = DEVICES[target.capability]
    label = program if kind is None else f"{program}_{kind.name}"
    with stage(label, spec), absent_device(device, folder):
        made = compile_cuda(graph, flags, device, name=label, narrow=kind is not None and kind.narrow)
        facts = library_facts(program, graph, made.library, flags) | cubin_facts(made.cubins)
    if kind is not None:
        facts |= {"specialisation": kind.name, "bounds": dict(kind.bounds)}
    return facts
