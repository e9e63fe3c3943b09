"""From a graph traced on the CPU to the same graph on a CUDA device that may be absent.

Graphs are traced on the CPU because the C++ autograd engine refuses fake CUDA tensors without a device.
Tried with torch 2.14.1, a wheel for CUDA; one for the CPU cannot make fake CUDA tensors.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, fx

from aotpack.build.export import Graph

__all__ = ["to_cuda"]

_CPU: Final = torch.device("cpu")
_CUDA: Final = torch.device("cuda", 0)


def to_cuda(graph: Graph) -> Graph:
    """The graph with its tensors on ``cuda:0``; its module is changed in place."""
    for module in graph.module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                _move(node)
            module.recompile()
    args = tuple(_fake_cuda(arg) for arg in graph.args)
    return Graph(module=graph.module, args=args, inputs=graph.inputs, outputs=graph.outputs)


def _move(node: fx.Node) -> None:
    # A number mixes with tensors of any device, and constant folding would make it on one that may be absent.
    if node.kwargs.get("device") == _CPU and node.target is not torch.ops.aten.scalar_tensor.default:
        node.kwargs = {**node.kwargs, "device": _CUDA}
    # What tracing noted of each value names the CPU; Inductor traces again and notes its own.
    node.meta.pop("tensor_meta", None)
    value = node.meta.pop("val", None)
    if value is not None and node.op == "placeholder":
        node.meta["val"] = _fake_cuda(value)


def _fake_cuda(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    mode: Any = value.fake_mode  # type: ignore[attr-defined]
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_CUDA)
