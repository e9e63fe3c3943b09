"""From a program's module to graphs that AOTInductor compiles: torch.export, joint graph, split, contract.

The only module that touches ``torch._functorch``. Tried with torch 2.13.0 and 2.14.1:
``aot_function`` with ``default_partition`` on the exported program's own fake inputs; ``FakeTensorMode`` and
``StatelessSymbolicContext`` for the inputs of a program that is traced as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotpack.build.programs import Program

__all__ = ["Graph", "differentiate", "export", "trace"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph:
    """A graph of tensors with fake example inputs, and the names of the calling convention.

    ``inputs`` of a backward graph say where each tensor comes from: a forward input's or output's name,
    ``saved.i``, or ``grad.NAME``. That list is the contract of what forward saves for backward.
    """

    module: fx.GraphModule
    args: tuple[Any, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def export(program: Program) -> Graph:
    """The inference graph of a program that is not differentiated."""
    exported = _exported(program).run_decompositions()
    args = tuple(n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder")
    module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return Graph(module=module, args=args, inputs=program.inputs, outputs=program.outputs)


def trace(program: Program) -> Graph:
    """The graph of a program that takes derivatives itself, which torch.export cannot follow (2.14.1)."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    args = tuple(
        mode.from_tensor(
            arg,
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[
                    DimDynamic.DYNAMIC if i in dims else DimDynamic.STATIC for i in range(arg.dim())
                ]
            ),
        )
        for arg, dims in zip(program.args, program.dynamic_shapes, strict=True)
    )
    with mode, enable_python_dispatcher():
        module = make_fx(program.module)(*args)
    return Graph(module=module, args=args, inputs=program.inputs, outputs=program.outputs)


def differentiate(program: Program, wanted: tuple[str, ...] = ("q", "k", "v")) -> tuple[Graph, Graph]:
    """Forward and backward graphs of a program; gradients of all outputs with respect to ``wanted``."""
    exported = _exported(program)
    module = exported.module(check_guards=False)
    args = [n.meta["val"] for n in exported.graph.nodes if n.op == "placeholder"]
    graphs: dict[str, fx.GraphModule] = {}
    examples: dict[str, list[Any]] = {}

    def keep(name: str) -> Any:
        def compiler(graph: fx.GraphModule, inputs: list[Any]) -> fx.GraphModule:
            graphs[name], examples[name] = graph, inputs
            return graph

        return compiler

    with args[0].fake_mode:
        for name, arg in zip(program.inputs, args, strict=True):
            arg.requires_grad_(name in wanted)
        # default_partition saves forward's outputs as they are and recomputes nothing; the min-cut one
        # may move attention itself into the backward.
        traced = aot_function(
            lambda *tensors: module(*tensors),
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=default_partition,
        )
        sum(out.sum() for out in traced(*args)).backward()
    return _split(program, wanted, graphs, examples)


def _exported(program: Program) -> torch.export.ExportedProgram:
    return torch.export.export(
        program.module, program.args, dynamic_shapes=(program.dynamic_shapes,), strict=False
    )


def _split(
    program: Program,
    wanted: tuple[str, ...],
    graphs: dict[str, fx.GraphModule],
    examples: dict[str, list[Any]],
) -> tuple[Graph, Graph]:
    forward, backward = graphs["forward"].graph, graphs["backward"].graph
    returned = _output(forward).args[0]
    known = dict(zip(_placeholders(forward), program.inputs, strict=True))
    known.update(zip(returned, program.outputs, strict=False))
    tensors = [n for n in returned if isinstance(n.meta["val"], Tensor)]
    scaled = _scaled(returned[: len(program.outputs)], program.outputs)
    known.update((node, name) for node, (name, _) in scaled.items() if node not in known)
    expanded = {o: o.args[0] for o in map(_origin, tensors) if _is_expanded(o, known)}
    known.update((node, known[source]) for node, source in expanded.items() if isinstance(source, fx.Node))
    saved = list(dict.fromkeys(o for o in map(_origin, tensors) if o not in known))
    known.update((node, f"saved.{i}") for i, node in enumerate(saved))
    sources = {node.name: known[_origin(node)] for node in (*_placeholders(forward), *tensors)}
    received = list(_placeholders(backward))
    _recompute_sizes(forward, backward)
    factors = {n.name: scaled[o][1] for n in tensors if (o := _origin(n)) in scaled}
    _rescale(backward, factors)
    tangents = iter(program.outputs)
    inputs = tuple(
        sources[n.name] if n.name in sources else f"grad.{next(tangents)}" for n in _placeholders(backward)
    )
    views = {n.name: o for n in tensors if (o := _origin(n)) in expanded}
    examples["backward"] = [
        views[n.name].args[0].meta["val"] if n.name in views else e  # type: ignore[union-attr]
        for n, e in zip(received, examples["backward"], strict=True)
    ]
    _expand(backward, views)
    kept = [e for e in examples["backward"] if isinstance(e, Tensor)]
    _output(forward).args = ((*returned[: len(program.outputs)], *saved),)
    _keep_outputs(backward, [i for i, name in enumerate(program.inputs) if name in wanted])
    for graph in graphs.values():
        graph.graph.eliminate_dead_code()
        graph.recompile()
    return (
        Graph(
            module=graphs["forward"],
            args=tuple(examples["forward"]),
            inputs=program.inputs,
            outputs=program.outputs + tuple(f"saved.{i}" for i in range(len(saved))),
        ),
        Graph(
            module=graphs["backward"],
            args=tuple(kept),
            inputs=inputs,
            outputs=tuple(f"grad.{name}" for name in wanted),
        ),
    )


def _origin(node: fx.Node) -> fx.Node:
    while node.target is torch.ops.aten.detach.default:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _scaled(outputs: Sequence[fx.Node], names: Sequence[str]) -> dict[fx.Node, tuple[str, float]]:
    """Values of which an output is a constant multiple: the output's name, and the factor back.

    Flex attention saves the log-sum-exp to base 2 and returns the natural one; one of them is enough.
    """
    return {
        node.args[0]: (name, 1 / node.args[1])  # type: ignore[misc]
        for node, name in zip(outputs, names, strict=True)
        if node.target is torch.ops.aten.mul.Tensor and isinstance(node.args[1], float)
    }


def _rescale(backward: fx.Graph, factors: Mapping[str, float]) -> None:
    """Multiplies the placeholders of these names where they are used."""
    for node in [n for n in _placeholders(backward) if n.name in factors]:
        with backward.inserting_after(node):
            scaled = backward.call_function(torch.ops.aten.mul.Tensor, (node, factors[node.name]))
        node.replace_all_uses_with(scaled, delete_user_cb=_is_not(scaled))


def _is_expanded(node: fx.Node, known: Mapping[fx.Node, str]) -> bool:
    """Whether a value is a forward input seen with more dimensions, which backward can see for itself."""
    return node.target is torch.ops.aten.expand.default and node.args[0] in known


def _expand(backward: fx.Graph, views: Mapping[str, fx.Node]) -> None:
    """Makes the placeholders of these names the inputs that forward expanded, and expands them here."""
    for node in [n for n in _placeholders(backward) if n.name in views]:
        source, sizes = views[node.name].args
        node.meta["val"] = source.meta["val"]  # type: ignore[union-attr]
        with backward.inserting_after(node):
            seen = backward.call_function(torch.ops.aten.expand.default, (node, sizes))
        node.replace_all_uses_with(seen, delete_user_cb=_is_not(seen))


def _is_not(other: fx.Node) -> Callable[[fx.Node], bool]:
    return lambda node: node is not other


def _recompute_sizes(forward: fx.Graph, backward: fx.Graph) -> None:
    """Takes the backward's sizes from its tensors: AOTInductor turns SymInt inputs into None."""
    sources = {node.name: node for node in forward.nodes}
    placeholders = list(_placeholders(backward))
    tensors = {n.name: n for n in placeholders if isinstance(n.meta["val"], Tensor)}
    first = next(node for node in backward.nodes if node.op != "placeholder")
    recomputed: dict[fx.Node, fx.Node] = {}

    def in_backward(node: fx.Node) -> fx.Node:
        if node.name in tensors:
            return tensors[node.name]
        if node not in recomputed:
            with backward.inserting_before(first):
                recomputed[node] = backward.node_copy(node, in_backward)
        return recomputed[node]

    for node in placeholders:
        if node.name not in tensors:
            node.replace_all_uses_with(in_backward(sources[node.name]))
            backward.erase_node(node)


def _keep_outputs(backward: fx.Graph, places: list[int]) -> None:
    output = _output(backward)
    output.args = (tuple(output.args[0][i] for i in places),)


def _placeholders(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "placeholder")


def _output(graph: fx.Graph) -> Any:
    return next(node for node in reversed(graph.nodes) if node.op == "output")
