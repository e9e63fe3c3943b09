"""Attention sinks in graphs that know nothing of them: nodes appended to forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx

from aotpack.build.export import Graph
from aotpack.scores import family_of, join_sinks, sinks_gradient
from aotpack.spec import AttentionSpec

__all__ = ["with_sinks"]


def with_sinks(spec: AttentionSpec, forward: Graph, backward: Graph) -> tuple[Graph, Graph]:
    """The graphs with the score's sinks joined; as they are where it has none.

    Forward has the sinks as an input that nobody reads. Backward finds the joined output and log-sum-exp
    where it looked for the others, which is what makes it right (``aotpack.scores.sinks``).
    """
    family = None if spec.score is None else family_of(spec.score)
    if family is None or family.sinks is None:
        return forward, backward
    name = f"score.{family.sinks}"
    nodes = _appended(forward, ("out", "lse", name), join_sinks)
    joined = Graph(
        module=_returning(forward, nodes, len(nodes)),
        args=forward.args,
        inputs=forward.inputs,
        outputs=forward.outputs,
    )
    if family.sinks not in {given.name for given in family.trained}:
        return joined, backward
    sinks = forward.args[forward.inputs.index(name)]
    backward = _with_inputs(backward, forward, {name: sinks})
    read = ("grad.out", "grad.lse", "out", "lse", name)
    gradient = _appended(backward, read, lambda *tensors: (sinks_gradient(*tensors),))
    return joined, Graph(
        module=_returning(backward, gradient, 0),
        args=backward.args,
        inputs=backward.inputs,
        outputs=(*backward.outputs, f"grad.{name}"),
    )


def _appended(graph: Graph, names: tuple[str, ...], function: Callable[..., Any]) -> list[fx.Node]:
    """Nodes that compute ``function`` of the graph's inputs or outputs of these names."""
    nodes = graph.module.graph
    output = _output(nodes)
    known = dict(zip(graph.outputs, output.args[0], strict=True))
    known.update(zip(graph.inputs, _placeholders(nodes), strict=True))
    values = [known[name].meta["val"] for name in names]
    mode = next(arg.fake_mode for arg in graph.args if isinstance(arg, Tensor))  # type: ignore[attr-defined]
    with mode, enable_python_dispatcher():
        traced = make_fx(function)(*values).graph
    replaced = dict(zip(_placeholders(traced), (known[name] for name in names), strict=True))
    with nodes.inserting_before(output):
        found: Any = nodes.graph_copy(traced, replaced)
    return list(found)


def _returning(graph: Graph, nodes: list[fx.Node], replaced: int) -> fx.GraphModule:
    """The module with these nodes in place of the first ``replaced`` outputs, or after all of them if 0."""
    output = _output(graph.module.graph)
    old = output.args[0]
    output.args = ((*nodes, *old[replaced:]),) if replaced else ((*old, *nodes),)
    graph.module.graph.lint()
    graph.module.recompile()
    return graph.module


def _with_inputs(backward: Graph, forward: Graph, missing: dict[str, Any]) -> Graph:
    nodes = backward.module.graph
    last = _placeholders(nodes)[-1]
    with nodes.inserting_after(last):
        for name, value in missing.items():
            node = nodes.placeholder(name.replace(".", "_"))
            node.meta["val"] = value
    return Graph(
        module=backward.module,
        args=(*backward.args, *missing.values()),
        inputs=(*backward.inputs, *missing),
        outputs=backward.outputs,
    )


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _output(graph: fx.Graph) -> Any:
    return next(node for node in reversed(graph.nodes) if node.op == "output")
