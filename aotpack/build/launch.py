"""A launch of a Triton kernel of our own as one node of a graph that AOTInductor compiles.

The only module that touches ``torch._higher_order_ops.triton_kernel_wrap``, ``ASTSource`` in
``torch._inductor.runtime.triton_heuristics`` and ``triton.experimental.gluon._runtime``; tried with torch
2.14.1 and triton 3.8.0. ``torch.library.wrap_triton`` makes the same node, but knows no tensor descriptors.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from aotpack.build.export import Graph
from aotpack.errors import BuildError, HostError

__all__ = ["check_written", "launch", "split_descriptors", "warp_specialised"]


def launch(
    kernel: Any,
    programs: Any,
    arguments: Mapping[str, Any],
    constants: Mapping[str, Any],
    descriptors: Mapping[str, tuple[int, ...]],
    *,
    warps: int,
    stages: int,
) -> None:
    """Launches ``kernel`` while a graph is traced.

    Args:
        kernel: a ``triton.jit`` function.
        programs: how many of it run; an int or a symbol of one.
        arguments: tensors, ints and symbols by the kernel's parameter names.
        constants: its ``tl.constexpr`` parameters.
        descriptors: the tile that each of these arguments is read by, if not as a pointer.
        warps: of one program.
        stages: of its loops' pipelines, where the kernel does not say.
    """
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import (
        create_tma_stable_metadata,
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    config = triton.Config({}, num_warps=warps, num_stages=stages)
    configured = triton.autotune(configs=[config], key=[])(kernel)
    triton_kernel_wrapper_mutation(
        kernel_idx=kernel_side_table.add_kernel(configured),
        constant_args_idx=kernel_side_table.add_constant_args(dict(constants)),
        grid=[(programs, 1, 1)],
        tma_descriptor_metadata={
            name: create_tma_stable_metadata(list(tile)) for name, tile in descriptors.items()
        },
        kwargs=dict(arguments),
    )


def check_written(graph: Graph, results: Collection[str]) -> None:
    """Raises ``BuildError`` where a launch is taken to write anything but the parameters ``results``.

    torch finds out by compiling the kernel for the active driver's device; where it cannot, it takes all
    tensors to be written, and copies every input.
    """
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    for node in graph.module.graph.nodes:
        if node.target is triton_kernel_wrapper_functional:
            written = set(node.kwargs["tensors_to_clone"])
            if not written <= set(results):
                raise BuildError(
                    "torch takes a kernel to write what it only reads",
                    expected=", ".join(sorted(results)),
                    found=", ".join(sorted(written)),
                    remedy="report this",
                )


@contextlib.contextmanager
def warp_specialised() -> Iterator[None]:
    """Inside, a kernel for which ``warp_specialised`` is set is compiled from its namesake in ``hopper``.

    torch writes each kernel into a file of its own, as a ``triton.jit`` function, and would not know one that
    is written in Gluon.

    Raises:
        HostError: this torch compiles kernels in another way.
    """
    heuristics: Any = importlib.import_module("torch._inductor.runtime.triton_heuristics")
    found = getattr(heuristics, "ASTSource", None)
    if found is None:
        raise HostError(
            "torch compiles kernels in another way than aotpack was made for",
            expected="ASTSource in torch._inductor.runtime.triton_heuristics",
            found="nothing of that name",
            remedy="build with torch 2.14.1",
        )

    def source(kernel: Any, signature: Mapping[str, str], constants: Mapping[str, Any], more: Any) -> Any:
        if not constants.get("warp_specialised"):
            return found(kernel, signature, constants, more)
        # Here, because most builds have no such kernel.
        from triton.experimental.gluon._runtime import GluonASTSource
        from triton.experimental.gluon.language import NVMMASharedLayout

        from aotpack.build.kernels import hopper

        layout = repr(NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3))
        # Gluon's descriptors also say how a tile lies in shared memory.
        types = {
            name: f"{kind[:-1]},{layout}>" if kind.startswith("tensordesc<") else kind
            for name, kind in signature.items()
        }
        return GluonASTSource(getattr(hopper, kernel.__name__), types, constants, more)

    try:
        heuristics.ASTSource = source
        yield
    finally:
        heuristics.ASTSource = found


_SWIZZLED: Final = "} else if (contigDimSizeInByte >= 128) {"
# A swizzled row of a tile has 128 bytes at most. Triton copies wider tiles in parts; torch's helper describes
# the whole tile, which the driver refuses.
_SPLIT: Final = _SWIZZLED + "\n blockSizeInt[0] = 128 / elemSize;"


@contextlib.contextmanager
def split_descriptors() -> Iterator[None]:
    """Inside, libraries describe tiles with rows of more than 128 bytes as triton's kernels copy them.

    Raises:
        HostError: this torch describes tiles in another way.
    """
    from torch._inductor import ir
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    found = CUDADeviceOpOverrides.tma_descriptor_helpers
    source = found(CUDADeviceOpOverrides())
    if source.count(_SWIZZLED) != 1:
        raise HostError(
            "torch's tensor descriptors differ from those that aotpack was made for",
            expected=f"{_SWIZZLED!r} once in tma_descriptor_helpers",
            found=source.count(_SWIZZLED),
            remedy="build with torch 2.14.1",
        )
    edited = source.replace(_SWIZZLED, _SPLIT)
    # Descriptors are remembered by their tensor's address, which an earlier graph's tensor may have had.
    ir.TMADescriptor._CACHE.clear()
    try:
        CUDADeviceOpOverrides.tma_descriptor_helpers = lambda self: edited  # type: ignore[method-assign]
        yield
    finally:
        CUDADeviceOpOverrides.tma_descriptor_helpers = found  # type: ignore[method-assign]
