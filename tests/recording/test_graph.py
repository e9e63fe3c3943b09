"""Graphs of recorded rules as text: read back as they were written, and nothing else is read."""

from __future__ import annotations

import json

import pytest
import torch

from aotpack.errors import SpecError
from aotpack.graph import Graph
from aotpack.masks import Lengths, dense, family_of
from aotpack.spec import AttentionSpec, MaskSpec, TensorInput
from tests.test_imports import COMPILER, offences

KEEP = TensorInput(name="keep", dtype="bool", dims=("B", "X0"))
BLOCKS = '{"nodes":[["floor_divide","q",16],["gather","keep","b","%0"]],"result":"%1"}'


def mask(text: str, *inputs: TensorInput) -> MaskSpec:
    return MaskSpec(family="recorded", graph=text, inputs=inputs or None)


def test_a_graph_is_read_back_as_it_was_written():
    graph = Graph.parse(BLOCKS, (KEEP,), ("b", "q", "kv"))
    assert graph.to_json() == BLOCKS
    assert graph.reads() == {"b", "q"}
    spec = AttentionSpec(heads=2, kv_heads=1, head_dim=16, dtype="float32", mask=mask(BLOCKS, KEEP))
    again = AttentionSpec.from_dict(json.loads(spec.to_json()))
    assert again == spec
    assert again.digest == spec.digest
    assert family_of(again.mask).inputs[0].dims == ("B", "X0")


def test_infinite_numbers_have_names():
    text = '{"nodes":[["ge","q","kv"],["where","%0","score","-inf"]],"result":"%1"}'
    graph = Graph.parse(text, (), ("score", "q", "kv"))
    q, kv = torch.arange(3).view(3, 1), torch.arange(3)
    found = graph.bind({})({"b": q, "q": q, "kv": kv, "score": torch.ones(3, 3)})
    assert torch.equal(found, torch.ones(3, 3).masked_fill(kv > q, -torch.inf))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is no JSON"),
        ("[" * 100000, "it is no JSON"),
        ("[]", "it has other fields than nodes and result"),
        ('{"nodes":[],"result":"q","code":"import os"}', "it has other fields than nodes and result"),
        ('{"nodes":{},"result":"q"}', "nodes is no list of at most 4096"),
        ('{"nodes":[3],"result":"q"}', "a node is no list that begins with an operator"),
        ('{"nodes":[["system","q"]],"result":"%0"}', "calls 'system'"),
        ('{"nodes":[["aten::sum","q"]],"result":"%0"}', "calls 'aten::sum'"),
        ('{"nodes":[["ge","q"]],"result":"%0"}', "'ge' takes 2 operands here"),
        ('{"nodes":[["ge","q","kv","kv"]],"result":"%0"}', "'ge' takes 2 operands here"),
        ('{"nodes":[["pow",9,9]],"result":"%0"}', "'pow' is given numbers alone"),
        ('{"nodes":[["where",true,"q","kv"]],"result":"%0"}', "'where' has a number for a condition"),
        ('{"nodes":[["neg","%0"]],"result":"%0"}', "an operand is neither a number nor a value"),
        ('{"nodes":[["neg","q"]],"result":"%1"}', "an operand is neither a number nor a value"),
        ('{"nodes":[["neg","q"]],"result":"%00"}', "an operand is neither a number nor a value"),
        ('{"nodes":[["neg","q"]],"result":"%\u0660"}', "an operand is neither a number nor a value"),
        ('{"nodes":[["neg","q"]],"result":NaN}', "an operand is neither a number nor a value"),
        ('{"nodes":[["neg","h"]],"result":"%0"}', "an operand is neither a number nor a value"),
        ('{"nodes":[["neg",["q"]]],"result":"%0"}', "an operand is neither a number nor a value"),
        ('{"nodes":[["mul","q",9223372036854775808]],"result":"%0"}', "an operand is neither a number"),
        ('{"nodes":[["gather","other","q"]],"result":"%0"}', "reads a tensor that the spec does not declare"),
        ('{"nodes":[["gather","keep","q"]],"result":"%0"}', "'gather' takes 2 operands here"),
        ('{"nodes":[["to","q","object"]],"result":"%0"}', "it casts to no dtype"),
    ],
)
def test_what_is_no_graph_is_refused(text, problem):
    with pytest.raises(SpecError, match=problem):
        family_of(mask(text, KEEP))


def test_a_recorded_mask_needs_its_graph():
    with pytest.raises(SpecError, match="mask family 'recorded' needs graph"):
        family_of(MaskSpec(family="recorded"))


def test_a_call_that_is_not_allowed_says_what_is():
    with pytest.raises(SpecError) as error:
        family_of(mask('{"nodes":[["load_library","q"]],"result":"%0"}'))
    assert "expected: one of abs, add, and, ceil" in str(error.value)
    assert "distrust where the graph came from" in str(error.value)


@pytest.mark.parametrize(("index", "nearest"), [("1000", 4), ("-1000", 0), ("-2", 3)])
def test_an_index_outside_of_its_axis_reads_no_other_memory(index, nearest):
    text = f'{{"nodes":[["add","kv",{index}],["gather","keep","b","%0"]],"result":"%1"}}'
    keep = torch.zeros(1, 5, dtype=torch.bool)
    keep[0, nearest] = True
    visible = dense(mask(text, KEEP), {"keep": keep}, Lengths(batch=1, query=2, key=1))
    assert visible.all()


def test_a_rule_that_does_not_read_its_places_has_every_cell():
    text = '{"nodes":[["gather","keep","b",0]],"result":"%0"}'
    rule = family_of(mask(text, KEEP)).rule(
        mask(text, KEEP), {"keep": torch.ones(2, 3, dtype=torch.bool)}, Lengths(batch=2, query=4, key=5)
    )
    b, q, kv = torch.zeros(7, 1, 1).long(), torch.arange(4).view(1, 4, 1), torch.arange(5)
    assert rule(b, q, kv).shape == (7, 4, 5)


def test_graphs_are_read_without_a_compiler():
    assert offences(("graph",), (*COMPILER, "aotpack.build", "aotpack.recording")) == []
    assert offences(("runtime", "masks", "dense"), ("aotpack.recording",)) == []
