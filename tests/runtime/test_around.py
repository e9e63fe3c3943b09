"""What trainers put around attend: checkpointing, scalers, torch.compile of the model, torch.func, copies."""

from __future__ import annotations

import copy
import io
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import aotpack
from aotpack.errors import HostError, InputError, IntegrityError, MismatchError, TrustError, UnsupportedError
from aotpack.runtime.transforms import TRANSFORMS
from aotpack.store import Store
from tests.cases import Case, make_case, run

ATTENTION = "aotpack.attention.default"


class Layer(nn.Module):
    """A layer with projections around an attention that it holds."""

    def __init__(self, attend: aotpack.Attention) -> None:
        super().__init__()
        self.attend = attend
        spec = attend.spec
        self.q = nn.Linear(spec.head_dim, spec.head_dim, bias=False)
        self.out = nn.Linear(spec.value_dim, spec.value_dim, bias=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Shapes as for attention."""
        return self.out(self.attend(self.q(q), k, v, mask).to(self.out.weight.dtype))


class Model(nn.Module):
    """Two layers, checkpointed as asked."""

    def __init__(self, attend: aotpack.Attention, how: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))
        self.how = how

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """Shapes as for attention."""
        for layer in self.layers:
            q = q + (
                layer(q, k, v, mask) if self.how is None else checkpoint(layer, q, k, v, mask, **self.how)
            )
        return q


@pytest.fixture
def pack(float32_package: Path) -> aotpack.Pack:
    """Of this test alone, so that its counts are."""
    return aotpack.load(float32_package)


@pytest.fixture
def attention(pack: aotpack.Pack) -> aotpack.Attention:
    return pack.attention("full")


@pytest.fixture
def case(attention: aotpack.Attention) -> Case:
    return make_case(attention.spec, 2, 150, 9)


def model_of(attend: aotpack.Attention, **how: Any) -> Model:
    torch.manual_seed(0)
    return Model(attend, how or None)


def gradients(model: nn.Module, case: Case, mask: Any) -> list[Tensor]:
    """Of every parameter, and of q."""
    q = case.q.clone().requires_grad_()
    model.zero_grad()
    model(q, case.k, case.v, mask).square().mean().backward()
    found = [tensor.grad for tensor in (*model.parameters(), q)]
    assert all(grad is not None for grad in found)
    return [grad.clone() for grad in found if grad is not None]


def counts(pack: aotpack.Pack) -> tuple[int, int]:
    stats = pack.stats().attentions["full"]
    return stats.forward["general"], stats.backward["general"]


def keep_attention(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = str(op) == ATTENTION
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_nothing(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    ("how", "forwards"),
    [
        ({"use_reentrant": True}, 4),
        ({"use_reentrant": False}, 4),
        (
            {
                "use_reentrant": False,
                "context_fn": lambda: create_selective_checkpoint_contexts(keep_attention),
            },
            2,
        ),
        (
            {
                "use_reentrant": False,
                "context_fn": lambda: create_selective_checkpoint_contexts(keep_nothing),
            },
            4,
        ),
    ],
    ids=["reentrant", "non-reentrant", "selective-saved", "selective-recomputed"],
)
def test_checkpointing_has_the_same_gradients_and_repeats_what_it_should(
    pack, attention, case, how, forwards
):
    mask = attention.block_mask(**case.mask)
    plain = gradients(model_of(attention), case, mask)
    before = counts(pack)
    found = gradients(model_of(attention, **how), case, mask)
    assert all(map(torch.equal, found, plain))
    after = counts(pack)
    assert (after[0] - before[0], after[1] - before[1]) == (forwards, 2)


def test_checkpointing_under_autocast_recomputes_under_autocast(dflash_pack):
    attention = dflash_pack.attention("full")
    case = make_case(attention.spec, 1, 70, 3, dtype=torch.float32)
    mask = attention.block_mask(**case.mask)
    with torch.autocast("cpu", torch.bfloat16):
        plain = gradients(model_of(attention), case, mask)
        found = gradients(model_of(attention, use_reentrant=False), case, mask)
    assert all(map(torch.equal, found, plain))
    assert {grad.dtype for grad in found} == {torch.float32}


def test_a_grad_scaler_sees_scaled_gradients_and_steps_as_without(attention, case):
    mask = attention.block_mask(**case.mask)
    scaled, plain = model_of(attention), model_of(attention)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for model, scale in ((scaled, scaler), (plain, None)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(case.q, case.k, case.v, mask).square().mean()
        if scale is None:
            loss.backward()
            optimizer.step()
        else:
            scale.scale(loss).backward()
            scale.step(optimizer)
            scale.update()
    for found, right in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, right, rtol=1e-5, atol=1e-7)


def test_a_grad_scaler_skips_a_step_whose_gradients_overflow(attention, case):
    mask = attention.block_mask(**case.mask)
    model = model_of(attention)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    scaler.scale(model(case.q, case.k, case.v, mask).square().mean() * 1e30).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**99
    assert all(map(torch.equal, model.parameters(), before))


def test_a_compiled_model_has_no_graph_break_and_two_opaque_calls(attention, case):
    forwards: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        forwards.append(graph)
        return graph

    mask = attention.block_mask(**case.mask)
    torch.compiler.reset()
    explained = torch._dynamo.explain(model_of(attention))(case.q, case.k, case.v, mask)
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    torch.compiler.reset()
    compiled = torch.compile(model_of(attention), backend=backend, fullgraph=True)
    plain = gradients(model_of(attention), case, mask)
    assert all(map(torch.equal, gradients(compiled, case, mask), plain))
    (graph,) = forwards
    assert [str(node.target) for node in graph.graph.nodes].count(ATTENTION) == 2


def test_a_compiled_and_differentiated_model_calls_the_programs_alone(pack, attention, case):
    torch.compiler.reset()
    mask = attention.block_mask(**case.mask)
    plain = gradients(model_of(attention), case, mask)
    compiled = torch.compile(model_of(attention), backend="aot_eager", fullgraph=True)
    gradients(compiled, case, mask)
    before = counts(pack)
    with aotpack.no_tracing():
        found = gradients(compiled, case, mask)
    after = counts(pack)
    assert (after[0] - before[0], after[1] - before[1]) == (2, 2)
    for one, right in zip(found, plain, strict=True):
        assert torch.allclose(one, right, rtol=1e-4, atol=1e-7)


def test_the_key_by_which_transforms_are_seen_is_there():
    with torch.library._scoped_library("aotpack_probe", "FRAGMENT") as library:
        library.define("probe(Tensor x) -> Tensor")
        library.impl("probe", lambda x: x, TRANSFORMS)
    assert isinstance(forward_ad._current_level, int)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, q: torch.func.vmap(f)(q[None]),
        lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
        lambda f, q: torch.func.vjp(f, q),
        lambda f, q: torch.func.jvp(f, (q,), (q,)),
        lambda f, q: torch.func.jacrev(f)(q),
        lambda f, q: torch.func.functionalize(f)(q),
    ],
    ids=["vmap", "grad", "vjp", "jvp", "jacrev", "functionalize"],
)
def test_transforms_of_torch_func_are_refused(attention, case, transform):
    mask = attention.block_mask(**case.mask)
    with pytest.raises(UnsupportedError, match=r"inside a transform of torch\.func"):
        transform(lambda q: attention(q, case.k, case.v, mask), case.q)
    assert run(attention, case)


@pytest.mark.parametrize("grad", [True, False])
def test_tangents_are_refused_and_never_dropped(attention, case, grad):
    mask = attention.block_mask(**case.mask)
    with torch.set_grad_enabled(grad), forward_ad.dual_level():
        right = attention(case.q, case.k, case.v, mask)
        with pytest.raises(UnsupportedError, match="no derivative in forward mode"):
            attention(forward_ad.make_dual(case.q, case.q), case.k, case.v, mask)
    assert torch.equal(right, attention(case.q, case.k, case.v, mask))


def test_inference_mode_around_the_model_and_its_mask(attention, case):
    model = model_of(attention)
    right = model(case.q, case.k, case.v, attention.block_mask(**case.mask))
    with torch.inference_mode():
        found = model(case.q, case.k, case.v, attention.block_mask(**case.mask))
    assert torch.equal(found, right)
    assert found.is_inference()


def test_a_copied_module_shares_its_attention(pack, attention, case):
    mask = attention.block_mask(**case.mask)
    model = model_of(attention)
    other = copy.deepcopy(model)
    assert other.layers[0].attend is attention
    assert other.layers[0].q.weight is not model.layers[0].q.weight
    assert all(map(torch.equal, gradients(other, case, mask), gradients(model, case, mask)))
    assert copy.copy(attention) is attention
    assert copy.deepcopy(pack) is pack
    assert copy.copy(pack) is pack


def test_a_pickled_module_loads_the_package_again(pack, attention, case):
    mask = attention.block_mask(**case.mask)
    model = model_of(attention)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    other = torch.load(buffer, weights_only=False)
    assert other.layers[0].attend is other.layers[1].attend is not attention
    assert other.layers[0].attend.spec == attention.spec
    assert all(map(torch.equal, gradients(other, case, mask), gradients(model, case, mask)))
    assert pickle.loads(pickle.dumps(pack)).digest == pack.digest


def test_a_pickle_names_classes_of_ours_alone(attention):
    names = {f"{module}.{name}" for module, name in _globals(pickle.dumps(attention, protocol=2))}
    assert names == {"aotpack.runtime.origin.reload_attention"}


def _globals(data: bytes) -> list[tuple[str, str]]:
    found = []

    class Reader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.append((module, name))
            return super().find_class(module, name)

    Reader(io.BytesIO(data)).load()
    return found


@pytest.fixture
def moved(float32_package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, and a store that knows nothing yet."""
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path / "store"))
    return Path(shutil.copy(float32_package, tmp_path / "moved.aotpack"))


@pytest.mark.parametrize("gone", ["deleted", "replaced", "damaged"])
def test_without_its_file_an_attention_comes_from_the_store(moved, dflash_package, case, gone):
    pack = aotpack.load(moved)
    attention = pack.attention("full")
    data = pickle.dumps([pack, attention])
    if gone == "deleted":
        moved.unlink()
    elif gone == "replaced":
        shutil.copy(dflash_package, moved)
    else:
        moved.write_bytes(b"damaged")
    found, other = pickle.loads(data)
    assert (found.digest, found.path) == (pack.digest, f"the package {pack.digest[:12]} in the store")
    assert all(map(torch.equal, run(other, case), run(attention, case)))
    # And on: what came from the store can be pickled again.
    assert pickle.loads(pickle.dumps(other)).spec == attention.spec


def test_with_neither_file_nor_store_it_says_where_it_looked(moved):
    data = pickle.dumps(aotpack.load(moved).attention("full"))
    moved.unlink()
    shutil.rmtree(Store().root)
    with pytest.raises(HostError, match="is not there any more") as caught:
        pickle.loads(data)
    assert str(moved) in str(caught.value)
    assert str(Store().root) in str(caught.value)
    shutil.copy(__file__, moved)
    with pytest.raises(HostError, match="is not there any more"):
        pickle.loads(data)


def test_a_pickle_with_another_spec_or_digest_or_shape_is_refused(attention, moved):
    reload, (state, name, spec) = attention.__reduce__()
    with pytest.raises(MismatchError, match="built for another attention 'full'"):
        reload(state, name, {**spec, "heads": 28})
    with pytest.raises((HostError, IntegrityError)):
        reload({**state, "digest": "0" * 64}, name, spec)
    for wrong in ({}, {**state, "places": 3}, {**state, "more": 1}, None):
        with pytest.raises(InputError, match="cannot be read"):
            reload(wrong, name, spec)


def test_a_pickle_asks_for_the_keys_of_the_environment(attention, monkeypatch, tmp_path):
    from aotpack.trust import generate_key_pair

    data = pickle.dumps(attention)
    generate_key_pair(tmp_path / "release.key")
    monkeypatch.setenv("AOTPACK_TRUSTED_KEYS", str(tmp_path / "release.key.pub"))
    with pytest.raises(TrustError, match="is not trusted"):
        pickle.loads(data)


def test_secrets_of_a_url_are_not_pickled():
    from aotpack.runtime.origin import Origin

    origin = Origin.of(
        "https://user:hunter2@host/a.aotpack?token=hunter2",
        digest="0" * 64,
        size=1,
        device="cpu",
        on_miss="error",
    )
    assert origin.places == ("https://host/a.aotpack",)


SPAWNED = """
import pickle, sys, torch
layer = pickle.load(open(sys.argv[1], "rb"))
print(layer.attend.name, torch.__version__)
"""


@pytest.mark.parametrize("python", [sys.executable, os.environ.get("AOTPACK_TEST_TORCH211", sys.executable)])
def test_another_process_reads_a_pickle(attention, tmp_path, python):
    (tmp_path / "layer.pkl").write_bytes(pickle.dumps(Layer(attention)))
    done = subprocess.run(
        [python, "-c", SPAWNED, str(tmp_path / "layer.pkl")],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("full "), done.stderr
