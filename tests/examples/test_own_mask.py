"""The example of a user's own rules: as users run it, and its rules against loops over cells in fp64."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aotpack
from aotpack.drafter import specs_from_config
from tests.cases import relative_error
from tests.conftest import EXAMPLES, build_once
from tests.examples.running import check_it_builds_once, run_example

PATH = EXAMPLES / "own_mask.py"


@pytest.fixture(scope="session")
def own_package(built: Path) -> Path:
    return build_once(built, "own-mask", specs_from_config(EXAMPLES / "own_mask.toml"))


def test_it_learns_and_its_rules_are_dense_math(own_package: Path):
    done = run_example("own_mask.py", "--package", own_package, "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == "aotpack.example.own/1"
    assert data["traces"] == 0
    assert data["last_loss"] < 0.7 * data["first_loss"]
    assert len(data["losses"]) == done.stderr.count("loss") == 40
    # It began as zeros: what is there came by its gradient.
    assert data["largest_bias"] > 0.01
    assert set(data["errors"]) == {"out", "dq", "dk", "dv", "dtable"}
    assert max(data["errors"].values()) < 1e-5


@pytest.mark.slow
def test_it_builds_its_own_package_once(tmp_path: Path):
    check_it_builds_once("own_mask.py", tmp_path)


def test_a_package_of_other_rules_is_an_error_of_ours(dflash_package: Path):
    done = run_example("own_mask.py", "--package", dflash_package)
    assert done.returncode == 3
    assert "mask.family: expected own_rules:streaming, found dflash" in done.stderr
    assert "Traceback" not in done.stderr


def cells(document: list[int], place: list[int], kind: list[int], table: Tensor) -> tuple[Tensor, Tensor]:
    """Of one row of a batch: what is visible [L, L], and the bias [H, L, L], cell by cell."""
    length = len(document)
    visible = torch.zeros(length, length, dtype=torch.bool)
    bias = torch.zeros(table.shape[0], length, length, dtype=torch.float64)
    for row in range(length):
        for key in range(row + 1):
            near, first = row - key <= 47, place[key] in (0, 1, 2, 3)
            visible[row, key] = document[row] == document[key] and (near or first)
            bias[:, row, key] = table[:, kind[row], kind[key]]
    return visible, bias


def test_output_and_gradients_are_those_of_a_loop_over_cells(own_package: Path):
    attend = aotpack.load(own_package).attention("own")
    generator = torch.Generator().manual_seed(0)
    sizes, length = (60, 90, 1), 151
    place = torch.cat([torch.arange(size) for size in sizes]).expand(2, -1).contiguous()
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes)).expand(2, -1).contiguous()
    kind = torch.randint(5, (2, length), generator=generator)
    shapes = ((2, 4, length, 32), (2, 2, length, 32), (2, 2, length, 32), (4, 5, 5))
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    grad_out = torch.randn(shapes[0], generator=generator)
    *qkv, table = leaves
    mask = attend.block_mask(document=document, place=place, query_len=length)
    attend(*qkv, mask, kind=kind, table=table).backward(grad_out)

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    q, k, v, exact_table = exact
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    outs = []
    for row in range(2):
        told = [t[row].tolist() for t in (document, place, kind)]
        visible, bias = cells(*told, exact_table)
        scores = q[row] @ k[row].mT / 32**0.5 + bias
        outs.append(scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v[row])
    torch.stack(outs).backward(grad_out.double())
    for name, found, right in zip(("q", "k", "v", "table"), leaves, exact, strict=True):
        assert relative_error(found.grad, right.grad) < 1e-5, name
