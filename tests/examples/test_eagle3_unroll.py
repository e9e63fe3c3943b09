"""The EAGLE-3 example: as users run it, and its loss against SpecForge's formula written out in fp64."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

import aotpack
from aotpack.demo.data import Corpus
from tests.cases import relative_error
from tests.examples.running import check_it_builds_once, run_example

PATH = Path(__file__).parents[2] / "examples" / "eagle3_unroll.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("eagle3_unroll", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("threads", [1, 2])
def test_it_learns_and_nothing_is_traced(masks_package, threads):
    done = run_example(
        "eagle3_unroll.py", "--package", masks_package, "--threads", threads, "--steps", 12, "--json"
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == "aotpack.example.eagle3/1"
    assert (data["threads"], data["device"], data["unroll"], data["traces"]) == (threads, "cpu", 7, 0)
    assert data["last_loss"] < 0.85 * data["first_loss"]
    assert data["calls"] == 7 * threads * len(data["losses"])
    assert len(data["losses"]) == done.stderr.count("loss") == 12


@pytest.mark.slow
def test_it_builds_its_own_package_once(tmp_path):
    check_it_builds_once("eagle3_unroll.py", tmp_path)


def test_a_package_of_another_drafter_is_an_error_of_ours(dflash_package):
    done = run_example("eagle3_unroll.py", "--package", dflash_package)
    assert done.returncode == 2
    assert "found: 'eagle3'" in done.stderr
    assert "Traceback" not in done.stderr


def attended(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """SpecForge's attention of one step without a mask: causal over the first step's keys, and one more
    logit for the row's own cell of each later step."""
    groups = q.shape[1] // keys[0].shape[1]
    keys, values = ([t.repeat_interleave(groups, dim=1) for t in part] for part in (keys, values))
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    logits = [(scale * q @ keys[0].mT).masked_fill(future, -torch.inf)]
    logits += [scale * (q * k).sum(-1, keepdim=True) for k in keys[1:]]
    weights = torch.cat(logits, dim=-1).softmax(-1).split([q.shape[2]] + [1] * (len(keys) - 1), dim=-1)
    own = [weight * v for weight, v in zip(weights[1:], values[1:], strict=True)]
    return sum(own, weights[0] @ values[0])


def dense_loss(drafter, target, tokens: Tensor, loss_mask: Tensor, scale: float) -> Tensor:
    """The loss of an unroll, row by row as its docstring says it."""
    rows, length = tokens.shape
    hidden, keys, values = drafter.fc(target(tokens)), [], []
    total = torch.zeros((), dtype=torch.float64)
    for step in range(7):
        ahead = torch.zeros_like(tokens)
        ahead[:, : length - step - 1] = tokens[:, step + 1 :]
        q, k, v = drafter.qkv(target.embedding(ahead), hidden, step)
        keys.append(k)
        values.append(v)
        hidden = drafter.close(hidden, attended(q, keys, values, scale))
        likely = (drafter.norm(hidden) @ target.embedding.weight.T).log_softmax(-1)
        chosen = [
            likely[b, label - step - 2, tokens[b, label]]
            for b in range(rows)
            for label in range(step + 2, length)
            if loss_mask[b, label]
        ]
        total = total - 0.8**step * torch.stack(chosen).mean()
    return total


def test_loss_and_gradients_are_those_of_dense_math(example, masks_pack: aotpack.Pack):
    attend = masks_pack.attention("eagle3")
    torch.manual_seed(0)
    target = example.Target(hidden_size=example.HIDDEN, layers=6, layer_ids=example.LISTENED)
    drafter = example.Drafter(attend.spec)
    batch = Corpus.of_standard_library().batch(3, 75, torch.Generator().manual_seed(3))
    assert len(set(example.text_lengths(batch.loss_mask).tolist())) > 1
    exact, exact_target = copy.deepcopy(drafter).double(), copy.deepcopy(target).double()
    # No spec has this dtype; the drafter's projections ask only what to cast to.
    exact.spec = SimpleNamespace(heads=attend.spec.heads, kv_heads=attend.spec.kv_heads, dtype="float64")

    loss = example.unrolled_loss(drafter, target, attend, batch)
    right = dense_loss(exact, exact_target, batch.tokens, batch.loss_mask, attend.spec.scale)
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
    loss.backward()
    right.backward()
    for (name, found), expected in zip(drafter.named_parameters(), exact.parameters(), strict=True):
        assert found.grad is not None, name
        assert relative_error(found.grad, expected.grad) < 2e-5, name
