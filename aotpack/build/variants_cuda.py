"""One spec for one CUDA device type: a block-mask program, and attention in each specialisation."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final

from aotpack.build import programs_dflash
from aotpack.build.absent import DEVICES, absent_device, check_torch
from aotpack.build.compile_cuda import SharedMemoryError, compile_cuda
from aotpack.build.cuda_toolkit import make_toolkit
from aotpack.build.export import Graph, differentiate, export
from aotpack.build.facts import cubin_facts, library_facts
from aotpack.build.kinds import kernels_of
from aotpack.build.launch import check_written
from aotpack.build.programs_cuda import attention_program, block_mask_program
from aotpack.build.scalars import with_pairs
from aotpack.build.sinks import with_sinks
from aotpack.build.specialisations import ATTENTION, BLOCK_MASK, Specialisation
from aotpack.build.tiles import Tiles
from aotpack.build.toolchain import HOST_FLAGS
from aotpack.errors import AotpackError, UnsupportedError
from aotpack.scores import family_of
from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning import DIRECTIONS, Options

__all__ = ["Part", "attention_graphs", "candidate_parts", "cuda_parts"]

# Compiles some of a spec's programs; returns their facts.
Part = Callable[[], list[dict[str, Any]]]
_Stage = Callable[[str, str], AbstractContextManager[None]]
# Kernel options by direction, and these by length class.
_Tuned = Mapping[str, Options]
_UNTUNED: Final[Mapping[str, _Tuned]] = {}


def cuda_parts(
    name: str,
    spec: AttentionSpec,
    target: Target,
    folder: Path,
    stage: _Stage,
    more: Sequence[Specialisation] = (),
    *,
    template: bool = False,
    tuned: Mapping[str, _Tuned] = _UNTUNED,
) -> list[Part]:
    """What compiles a spec's programs, in parts that do not depend on each other.

    A part raises ``UnsupportedError`` when a kernel needs more shared memory than the device type has, with
    any tiles.

    Args:
        name: of the spec, for progress.
        spec: what to compile.
        target: a CUDA device type.
        folder: of the build.
        stage: reports a stage, named by its program, and the spec's name.
        more: specialisations of attention beside the usual ones, and before them.
        template: compile torch's flex attention also where there are kernels of our own.
        tuned: kernel options by length class and direction.
    """
    compiler = _ready(target, folder)
    own = kernels_of(spec, target, template=template) == "dflash"
    # Our own kernels take any lengths as they come, and index heads with 64 bits: one program serves all.
    attention, general = (_dflash, ATTENTION[-1:]) if own else (_attention, ATTENTION)
    return [
        partial(_block_mask, name, spec, compiler, stage, own=own),
        *(
            partial(attention, name, spec, kind, compiler, stage, tuned.get(_class_of(kind, own=own), {}))
            for kind in (*more, *general)
        ),
    ]


def candidate_parts(
    name: str,
    spec: AttentionSpec,
    target: Target,
    folder: Path,
    stage: _Stage,
    length_class: str,
    wanted: Iterable[tuple[str, Options]],
) -> list[Part]:
    """What compiles a block mask, then one program for each direction and options, whatever came before.

    A part of a program returns ``[{"refused": why}]`` where it cannot be compiled or outgrows the device;
    there are no smaller tiles in its place. The other arguments are ``cuda_parts``'s.
    """
    compiler, own = _ready(target, folder), length_class == "any"
    kind = next((each for each in ATTENTION if each.name == length_class), ATTENTION[-1])
    return [
        partial(_block_mask, name, spec, compiler, stage, own=own),
        *(
            partial(_candidate, name, spec, kind, compiler, stage, direction, options, own=own)
            for direction, options in wanted
        ),
    ]


def _ready(target: Target, folder: Path) -> _Compiler:
    check_torch()
    make_toolkit(folder)  # before the parts, which would each make it
    return _Compiler(target, folder)


def _class_of(kind: Specialisation, *, own: bool) -> str:
    """The length class of a tuning that a specialisation belongs to."""
    if own:
        return "any"
    return "div128" if kind.whole else "int32" if kind.narrow else "general"


def _candidate(
    name: str,
    spec: AttentionSpec,
    kind: Specialisation,
    compiler: _Compiler,
    stage: _Stage,
    direction: str,
    options: Options,
    *,
    own: bool,
) -> list[dict[str, Any]]:
    said = " ".join(f"{option}={value}" for option, value in options.items())
    try:
        with stage(f"{direction} {kind.name} {said}".rstrip(), name):
            graph = _graph(spec, kind, compiler, direction, options, own=own)
            return [compiler.program(direction, kind, graph)]
    except AotpackError as error:
        return [{"refused": " ".join(f"{error.problem} ({error.found})".split())}]
    except Exception as error:  # noqa: BLE001
        # Triton and Inductor refuse options in ways of their own, and that they do is a result.
        return [{"refused": " ".join(f"{type(error).__name__}: {error}".split())}]


def _graph(
    spec: AttentionSpec,
    kind: Specialisation,
    compiler: _Compiler,
    direction: str,
    options: Options,
    *,
    own: bool,
) -> Graph:
    place = DIRECTIONS.index(direction)
    if not own:
        return attention_graphs(spec, kind, Tiles.preferred({direction: options}).options)[place]
    program = programs_dflash.attention_programs(spec, kind, {direction: options})[place]
    with compiler.device():
        graph = export(program.program)
    check_written(graph, program.results)
    return graph


def _block_mask(
    name: str, spec: AttentionSpec, compiler: _Compiler, stage: _Stage, *, own: bool
) -> list[dict[str, Any]]:
    with stage("block_mask", name):
        program = programs_dflash.block_mask_program(spec) if own else block_mask_program(spec, BLOCK_MASK)
        return [compiler.program("block_mask", BLOCK_MASK, export(program))]


def _dflash(
    name: str, spec: AttentionSpec, kind: Specialisation, compiler: _Compiler, stage: _Stage, tuned: _Tuned
) -> list[dict[str, Any]]:
    made = []
    for direction in DIRECTIONS:
        with stage(f"{direction} {kind.name}", name):
            graph = _graph(spec, kind, compiler, direction, tuned.get(direction, {}), own=True)
            made.append(compiler.program(direction, kind, graph))
    return made


def _attention(
    name: str, spec: AttentionSpec, kind: Specialisation, compiler: _Compiler, stage: _Stage, tuned: _Tuned
) -> list[dict[str, Any]]:
    tiles = Tiles.preferred(tuned)
    while True:
        with stage(f"export {kind.name}", name):
            graphs = attention_graphs(spec, kind, tiles.options)
        made = []
        for program, graph in zip(DIRECTIONS, graphs, strict=True):
            try:
                with stage(f"{program} {kind.name}", name):
                    made.append(compiler.program(program, kind, graph))
            except SharedMemoryError as error:
                smaller = tiles.smaller(program)
                if smaller is None:
                    raise UnsupportedError(
                        f"{name!r} does not fit {compiler.target}: {error.problem}",
                        expected=error.expected,
                        found=f"{error.found} with the smallest tiles",
                        remedy="leave this device type out for this spec, or take smaller heads",
                    ) from error
                tiles = smaller
                break
        else:
            return made


def attention_graphs(
    spec: AttentionSpec, kind: Specialisation, options: Mapping[str, int]
) -> tuple[Graph, Graph]:
    """Forward and backward of a spec's attention in one specialisation, on the CPU."""
    score = None if spec.score is None else family_of(spec.score)
    trained = () if score is None else (g.name for g in score.trained if g.name != score.sinks)
    wanted = ("q", "k", "v", *(f"score.{name}" for name in trained))
    forward, backward = differentiate(attention_program(spec, kind, options), wanted)
    return with_sinks(spec, forward, with_pairs(backward))


class _Compiler:
    def __init__(self, target: Target, folder: Path) -> None:
        assert target.capability is not None
        self.target, self.capability = target, target.capability
        self._device, self._folder = DEVICES[target.capability], folder
        self._flags = HOST_FLAGS["aarch64" if platform.machine() == "aarch64" else "x86_64-v3"]

    def device(self) -> AbstractContextManager[None]:
        """Inside, torch and triton find the target's device."""
        return absent_device(self._device, self._folder)

    def program(self, name: str, kind: Specialisation, graph: Graph) -> dict[str, Any]:
        """Compiles one program; returns its facts."""
        label = re.sub(r"\W", "_", f"{name}_{kind.name}")
        with self.device():
            # Block lists are tuned for more than one block and right for one; see block_mask_program.
            strict = name != "block_mask"
            made = compile_cuda(
                graph, self._flags, self._device, name=label, narrow=kind.narrow, strict=strict
            )
        return {
            **library_facts(name, graph, made.library, self._flags),
            **cubin_facts(made.cubins),
            "specialisation": kind.name,
            "bounds": dict(kind.bounds),
        }
