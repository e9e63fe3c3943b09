"""Gradients of single numbers, in a form that AOTInductor compiles for CUDA.

A kernel whose result has one element fails to compile there (torch 2.14.1: "AssertionError" about a kernel's
arguments, one of them ``sympy.core.numbers.One``). Sums to one number are taken twice, as one kernel with two
results, of which the first is returned.
"""

from __future__ import annotations

from typing import Any

import torch

from aotpack.build.export import Graph

__all__ = ["with_pairs"]


def with_pairs(backward: Graph) -> Graph:
    """The graph, changed in place, without outputs that are sums of a whole vector."""
    aten = torch.ops.aten
    nodes = backward.module.graph
    output: Any = next(node for node in reversed(nodes.nodes) if node.op == "output")
    for node in [each for each in output.args[0] if each.target is aten.sum.default]:
        (vector,) = node.args
        with nodes.inserting_before(node):
            pair = nodes.call_function(aten.expand.default, (vector, [2, *vector.meta["val"].shape]))
            sums = nodes.call_function(aten.sum.dim_IntList, (pair, [1]))
            first = nodes.call_function(aten.select.int, (sums, 0, 0))
        first.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(first)
        nodes.erase_node(node)
    backward.module.recompile()
    return backward
