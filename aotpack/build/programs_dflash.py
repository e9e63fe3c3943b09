"""The programs of a DFlash drafter on a device for which its own kernels were measured.

The block mask is ``ends``, int32 [B, N]: each block's anchor, and -1 for one that is not kept. Forward and
backward are launches of ``aotpack.build.kernels.dflash``, or of their namesakes in ``hopper``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.export import Dim

from aotpack.build.blocks import mask_arguments
from aotpack.build.launch import launch
from aotpack.build.programs import Program
from aotpack.build.specialisations import MAX_BATCH, MAX_LENGTH, Specialisation
from aotpack.errors import UnsupportedError
from aotpack.spec import AttentionSpec
from aotpack.spec.tensors import shape_of
from aotpack.tuning import Options

__all__ = ["AttentionProgram", "attention_programs", "block_mask_program"]


# Rows are padded to this in the tensors that one backward kernel writes for the other.
_PADDED: Final = 128
_UNTUNED: Final[Mapping[str, Options]] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tiles:
    """How a kernel is launched where no option says otherwise.

    With 8 warps and 3 stages backward_keys gave other results from run to run (triton 3.8.0).

    Attributes:
        rows, keys: of its tiles; larger ones leave room for one program on a multiprocessor of an H200, and
            smaller ones multiply too little for each load.
        warps: of a program.
        stages: of its loop's pipeline.
        abreast: how many heads run at once.
        tma: whether tiles are read through tensor descriptors.
        warp_specialised: whether the kernel is the one in ``kernels.hopper``.
    """

    rows: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 2
    abreast: int = 1
    tma: bool = True
    warp_specialised: bool = False

    @classmethod
    def of(cls, spec: AttentionSpec, options: Options, prefix: str = "", **usual: int) -> _Tiles:
        """From the options whose names begin with a prefix, and ``tma``, which all of a direction's share."""
        chosen: dict[str, Any] = {
            name.removeprefix(prefix): value for name, value in options.items() if name.startswith(prefix)
        }
        chosen |= {"tma": options["tma"]} if "tma" in options else {}
        tiles = cls(**{**usual, **chosen})
        if spec.heads % tiles.abreast:
            raise UnsupportedError(
                "a tuning's heads do not divide those of the spec",
                expected=f"a divisor of {spec.heads}",
                found=f"{prefix}abreast {tiles.abreast}",
                remedy="build with another tuning record",
            )
        return tiles


class _Ends(torch.nn.Module):
    def forward(self, *args: Tensor) -> tuple[Tensor]:
        anchors, keep, context = args
        # Values are not checked on a GPU, where that would wait; a wrong one must not read past an end.
        bounded = anchors.clamp(0, context.shape[0])
        # Not torch.where: its -1 would be a tensor, and Inductor evaluates constant ones, on a device.
        return (((bounded + 1) * keep - 1).to(torch.int32),)


def block_mask_program(spec: AttentionSpec) -> Program:
    """Inputs anchors, keep and the context's length carrier; output ends."""
    arguments = mask_arguments(spec.mask, {"B": 2, "N": 509, "T": 4099})
    batch, length = Dim.DYNAMIC(max=MAX_BATCH), Dim.DYNAMIC(max=MAX_LENGTH)
    return Program(
        module=_Ends(),
        args=arguments.tensors,
        dynamic_shapes=tuple(
            {i: batch if axis == "B" else length for i, axis in enumerate(axes)} for axes in arguments.axes
        ),
        inputs=arguments.names,
        outputs=("ends",),
    )


class _Kernels(torch.nn.Module):
    """What forward and backward share: how a kernel is launched for a spec."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.constants: dict[str, Any] = {
            "heads": spec.heads,
            "kv_heads": spec.kv_heads,
            "dim": spec.head_dim,
            "size": spec.mask.block_size,
            "window": spec.mask.window,
            "scale": spec.scale * math.log2(math.e),
        }

    def launch(
        self, kernel: Any, tiles: _Tiles, programs: Any, tensors: Mapping[str, Any], **constants: Any
    ) -> None:
        """Launches a kernel with the lengths of q, k and ends and with what its loop reads by tiles."""
        read = {"q": tiles.rows, "grad": tiles.rows, "k": tiles.keys, "v": tiles.keys}
        of_tiles = {
            "block_m": tiles.rows,
            "block_n": tiles.keys,
            "stages": tiles.stages,
            "tma": tiles.tma,
        }
        launch(
            kernel,
            programs,
            {n: t.flatten(0, 1) if n in read else t for n, t in tensors.items()},
            {**self.constants, **of_tiles, **constants},
            {n: (1, size, self.spec.head_dim) for n, size in read.items() if n in tensors and tiles.tma},
            warps=tiles.warps,
            stages=tiles.stages,
        )


class _Forward(_Kernels):
    def __init__(self, spec: AttentionSpec, options: Options) -> None:
        super().__init__(spec)
        # Keys of one entry stay in the L2 cache while all its heads run.
        self.tiles = _Tiles.of(spec, options, abreast=spec.heads)

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
        from aotpack.build.kernels import dflash

        q, k, v, ends = args
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)
        programs = _tiles(q.shape[2], self.tiles.rows) * q.shape[0] * self.spec.heads
        lengths: Any = {"query": q.shape[2], "key": k.shape[2], "blocks": ends.shape[1]}
        tensors = {"q_ptr": q, "k": k, "v": v, "ends_ptr": ends, "out_ptr": out, "lse_ptr": lse}
        self.launch(
            dflash.forward,
            self.tiles,
            programs,
            {**tensors, **lengths},
            abreast=self.tiles.abreast,
            warp_specialised=self.tiles.warp_specialised,
        )
        return out, lse


class _Backward(_Kernels):
    def __init__(self, spec: AttentionSpec, options: Options) -> None:
        super().__init__(spec)
        self.queries = _Tiles.of(spec, options, "queries_", abreast=spec.group_size)
        self.keys = _Tiles.of(spec, options, "keys_")

    def forward(self, *args: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from aotpack.build.kernels import dflash

        q, k, v, ends, out, lse, grad, grad_lse = args
        spec, query, key = self.spec, q.shape[2], k.shape[2]
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        padded = (*q.shape[:2], _tiles(query, _PADDED) * _PADDED)
        shift, delta = (q.new_empty(padded, dtype=torch.float32) for _ in range(2))
        lengths: Any = {"query": query, "key": key, "blocks": ends.shape[1]}
        given = {"out_ptr": out, "lse_ptr": lse, "grad_ptr": grad, "grad_lse_ptr": grad_lse}
        between = {"ends_ptr": ends, "shift_ptr": shift, "delta_ptr": delta}
        self.launch(
            dflash.backward_queries,
            self.queries,
            _tiles(query, self.queries.rows) * q.shape[0] * spec.heads,
            {"q_ptr": q, "k": k, "v": v, "dq_ptr": dq, **given, **between, **lengths},
            factor=spec.scale,
            abreast=self.queries.abreast,
            warp_specialised=self.queries.warp_specialised,
        )
        tiles = _tiles(key - query, self.keys.keys) + _tiles(query, self.keys.keys)
        self.launch(
            dflash.backward_keys,
            self.keys,
            tiles * q.shape[0] * spec.kv_heads,
            {"q": q, "k": k, "v": v, "grad": grad, "dk_ptr": dk, "dv_ptr": dv, **between, **lengths},
            factor=spec.scale,
        )
        return dq, dk, dv


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionProgram:
    """Forward or backward.

    Attributes:
        name: ``"forward"`` or ``"backward"``.
        program: for torch.export.
        results: the kernels' parameters that they write.
    """

    name: str
    program: Program
    results: frozenset[str]


def attention_programs(
    spec: AttentionSpec, specialisation: Specialisation, tuned: Mapping[str, Options] = _UNTUNED
) -> tuple[AttentionProgram, AttentionProgram]:
    """Forward from q, k, v and ends to out and lse; backward from these and their gradients.

    Args:
        spec: what is computed.
        specialisation: the shapes.
        tuned: kernel options by direction.

    Raises:
        UnsupportedError: options that do not fit the spec's heads.
    """
    taken, returned = ("q", "k", "v", "mask.ends"), ("out", "lse")
    passed = (*taken, *returned, "grad.out", "grad.lse")
    gradients = ("grad.q", "grad.k", "grad.v")
    return (
        AttentionProgram(
            name="forward",
            program=_program(_Forward(spec, tuned.get("forward", {})), specialisation, taken, returned),
            results=frozenset({"out_ptr", "lse_ptr"}),
        ),
        AttentionProgram(
            name="backward",
            program=_program(_Backward(spec, tuned.get("backward", {})), specialisation, passed, gradients),
            results=frozenset({"dq_ptr", "dk_ptr", "dv_ptr", "shift_ptr", "delta_ptr"}),
        ),
    )


def _program(
    module: _Kernels, specialisation: Specialisation, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> Program:
    spec, fixed = module.spec, specialisation.fixed
    dtype = getattr(torch, spec.dtype)
    query, key = ("B", spec.heads, "Q", spec.head_dim), ("B", spec.kv_heads, "K", spec.head_dim)
    known: dict[str, tuple[tuple[str | int, ...], torch.dtype]] = {
        **dict.fromkeys(("q", "out", "grad.out"), (query, dtype)),
        **dict.fromkeys(("k", "v"), (key, dtype)),
        **dict.fromkeys(("lse", "grad.lse"), (query[:3], torch.float32)),
        "mask.ends": (("B", "N"), torch.int32),
    }
    sizes = {"B": 2, "Q": 8224, "K": 8224 + 4099, **fixed}
    sizes["N"] = -(-sizes["Q"] // spec.mask.draft_size)
    dims = {} if fixed else {axis: Dim(axis, min=1, max=MAX_LENGTH) for axis in "QKN"}
    dims |= {} if fixed else {"B": Dim("B", min=1, max=MAX_BATCH)}
    taken = [known[name] for name in inputs]
    return Program(
        module=module,
        # Empty, because nobody reads their values and most of them are large.
        args=tuple(torch.empty(shape_of(axes, sizes), dtype=t) for axes, t in taken),
        dynamic_shapes=tuple(
            {i: dims[axis] for i, axis in enumerate(axes) if isinstance(axis, str) and axis in dims}
            for axes, _ in taken
        ),
        inputs=inputs,
        outputs=outputs,
    )


def _tiles(length: Any, size: int) -> Any:
    return (length + size - 1) // size
