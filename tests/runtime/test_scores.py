"""Scored attention through a package: results, gradients, chunks, determinism, operators and errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import aotpack
from aotpack.errors import InputError, UnsupportedError
from aotpack.package import Package
from aotpack.runtime import chunks
from aotpack.runtime.selftest import self_test
from aotpack.scores import family_of
from tests.conftest import build_once
from tests.runtime.test_direct import Dispatched
from tests.score_cases import ScoreCase, exact, run, score_case
from tests.score_specs import PACKAGED

SIZES = [(1, 64, 1), (2, 777, 13), (3, 130, 24)]


@pytest.fixture(scope="session")
def package(built: Path) -> Path:
    return build_once(built, "scores", PACKAGED)


@pytest.fixture(scope="session")
def pack(package: Path) -> aotpack.Pack:
    return aotpack.load(package)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", PACKAGED)
def test_results_and_gradients_agree_with_dense_math(
    pack: aotpack.Pack, name: str, sizes: tuple[int, int, int]
) -> None:
    case = score_case(PACKAGED[name], *sizes)
    for found, right in zip(run(pack.attention(name), case), exact(case), strict=True):
        case.check(found, right)


@pytest.mark.parametrize("name", PACKAGED)
def test_small_chunks_give_the_same_results(
    pack: aotpack.Pack, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "SCORE_BYTES", 1)
    case = score_case(PACKAGED[name], 2, 500, 25)
    for found, right in zip(run(pack.attention(name), case), exact(case), strict=True):
        case.check(found, right)


def test_empty_rows_are_exact_whatever_the_loss_makes_of_them(pack: aotpack.Pack) -> None:
    for name in ("softcap-dflash", "sinks", "chain"):
        case = score_case(PACKAGED[name], 2, 200, 9)
        empty = ~case.visible.any(-1).expand(-1, case.spec.heads, -1)
        assert empty.any()
        case.grad_lse[empty] = torch.nan
        out, lse, dq, *others = run(pack.attention(name), case)
        assert (out[empty] == 0).all()
        assert (lse[empty] == -torch.inf).all()
        assert (dq[empty] == 0).all()
        assert all(tensor.isfinite().all() for tensor in others)


def test_a_mask_without_a_visible_cell(pack: aotpack.Pack) -> None:
    for name in ("softcap-dflash", "sinks", "chain"):
        case = score_case(PACKAGED[name], 1, 100, 5)
        case.mask["keep"] = torch.zeros(1, 5, dtype=torch.bool)
        out, lse, *grads = run(pack.attention(name), case)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert all((grad == 0).all() for grad in grads)


def test_a_torch_block_mask(pack: aotpack.Pack) -> None:
    attend, case = pack.attention("softcap"), score_case(PACKAGED["softcap"], 2, 300, 10)
    visible = torch.rand(2, case.q.shape[2], 300, generator=torch.Generator().manual_seed(0)) < 0.3
    mask = create_block_mask(lambda b, h, q, kv: visible[b, q, kv], 2, None, *visible.shape[1:], device="cpu")
    right = exact(ScoreCase(**{**fields(case), "visible": visible[:, None]}))
    q, k, v = (t.clone().requires_grad_() for t in (case.q, case.k, case.v))
    out, lse = attend(q, k, v, mask, return_lse=True)
    torch.autograd.backward([out, lse], [case.grad_out, case.grad_lse])
    for found, expected in zip((out, lse, q.grad, k.grad, v.grad), right, strict=True):
        case.check(found.detach(), expected)


def fields(case: ScoreCase) -> dict[str, Any]:
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


@pytest.mark.parametrize("name", [n for n, spec in PACKAGED.items() if spec.deterministic])
def test_gradients_are_bit_equal_from_run_to_run_and_across_thread_counts(
    pack: aotpack.Pack, name: str
) -> None:
    case = score_case(PACKAGED[name], 1, 1500, 40)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 2, 3):
            torch.set_num_threads(count)
            found.append(run(pack.attention(name), case))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_specs_that_differ_in_the_mask_alone_share_their_programs(package: Path) -> None:
    with Package.open(package) as opened:
        manifest = opened.manifest
    digests = {name: spec.digest for name, spec in manifest.specs.items()}
    by_spec = {variant.spec: variant for variant in manifest.variants}
    shared = [by_spec[digests[name]] for name in ("softcap", "softcap-dflash")]
    for program in ("forward", "backward"):
        assert len({variant.program(program).library for variant in shared}) == 1
    assert len({variant.program("forward").library for variant in by_spec.values()}) == len(by_spec) - 1


def test_the_manifest_names_what_programs_take_and_give(package: Path) -> None:
    with Package.open(package) as opened:
        manifest = opened.manifest
    (chain,) = (v for v in manifest.variants if v.spec == PACKAGED["chain"].digest)
    forward, backward = chain.program("forward"), chain.program("backward")
    tensors = ("score.offsets", "score.levels", "score.sinks", "score.groups")
    assert forward.inputs[9:] == ("rows", *tensors)
    assert forward.bounds == backward.bounds == {"rows": 128}
    names = [f"grad.score.{given.name}" for given in family_of(PACKAGED["chain"].score).trained]
    assert backward.outputs == ("grad.q", "grad.k", "grad.v", *names)
    assert set(names) <= set(chain.tolerance)
    (sinks,) = (v for v in manifest.variants if v.spec == PACKAGED["sinks"].digest)
    assert sinks.program("forward").bounds == {}
    assert sinks.program("backward").outputs[3:] == ("grad.score.sinks",)


def test_golden_vectors_hold_the_scores_tensors_and_gradients(package: Path) -> None:
    report = self_test(package)
    assert report.passed, [check for check in report.checks if not check.passed]
    checked = {(check.spec, check.what) for check in report.checks}
    for name, spec in PACKAGED.items():
        for given in family_of(spec.score).trained:
            assert (name, f"grad.score.{given.name}") in checked


def test_scores_of_a_chunk_bound_the_memory(pack: aotpack.Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "SCORE_BYTES", 1 << 20)
    case = score_case(PACKAGED["softcap"], 1, 2048, 128)
    steps = []
    step = chunks.Chunked._step
    monkeypatch.setattr(chunks.Chunked, "_step", lambda self, row: steps.append(step(self, row)) or steps[-1])
    run(pack.attention("softcap"), case)
    assert steps == [128, 128]


def test_operators_pass_torchs_own_checks(pack: aotpack.Pack) -> None:
    for name in ("sinks", "chain"):
        attend, case = pack.attention(name), score_case(PACKAGED[name], 1, 100, 3)
        mask = list(attend.block_mask(**case.mask).tensors)
        family = family_of(case.spec.score)
        tensors = [case.score[given.name] for given in family.inputs]
        trained = [t.clone().requires_grad_() for t in tensors[: len(family.trained)]]
        inputs = [t.clone().requires_grad_() for t in (case.q, case.k, case.v)]
        arguments = (attend._key, *inputs, mask, trained, tensors[len(trained) :])
        torch.library.opcheck(torch.ops.aotpack.scored_attention.default, arguments)


def test_kernels_get_tensors_where_they_can_read_16_bytes_at_once(
    pack: aotpack.Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, case = pack.attention("chain"), score_case(PACKAGED["chain"], 1, 100, 3)

    mask = attend.block_mask(**case.mask)

    def offset(tensor: Tensor) -> Tensor:
        moved = torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)
        assert moved.data_ptr() % 16
        return moved

    def gradients(place: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        inputs = [place(tensor).requires_grad_() for tensor in (case.q, case.k, case.v)]
        out = attend(*inputs, mask, **{name: place(tensor) for name, tensor in case.score.items()})
        return (out, *torch.autograd.grad(out, inputs, place(case.grad_out)))

    expected = gradients(Tensor.clone)
    places: list[int] = []

    def watched(program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            *tensors, _, score = arguments
            places.extend(tensor.data_ptr() % 16 for tensor in (*tensors, *score))
            return program(*arguments)

        return run

    for name in ("forward", "backward"):
        monkeypatch.setattr(attend._programs, name, watched(getattr(attend._programs, name)))
    found = gradients(offset)
    assert set(places) == {0}
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", PACKAGED)
def test_plain_calls_have_the_operators_bits(pack: aotpack.Pack, name: str) -> None:
    attend, case = pack.attention(name), score_case(PACKAGED[name], 2, 150, 9)
    found = run(attend, case)
    with Dispatched() as mode:
        expected = run(attend, case)
    assert {"aotpack::scored_attention", "aotpack::scored_attention_backward"} <= set(mode.seen)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_mode_that_is_on_in_backward_alone_sees_the_operator_there(pack: aotpack.Pack) -> None:
    attend, case = pack.attention("chain"), score_case(PACKAGED["chain"], 1, 100, 3)
    q = case.q.clone().requires_grad_()
    out = attend(q, case.k, case.v, attend.block_mask(**case.mask), **case.score)
    with Dispatched() as mode:
        out.backward(case.grad_out)
    assert "aotpack::scored_attention_backward" in mode.seen
    plain = case.q.clone().requires_grad_()
    attend(plain, case.k, case.v, attend.block_mask(**case.mask), **case.score).backward(case.grad_out)
    assert torch.equal(q.grad, plain.grad)


def test_torch_compile_around_it_has_the_same_gradients(pack: aotpack.Pack) -> None:
    attend, case = pack.attention("tempered"), score_case(PACKAGED["tempered"], 1, 150, 5)
    mask, weights = attend.block_mask(**case.mask), case.score["weights"]

    def loss(q: Tensor, temperature: Tensor) -> Tensor:
        out, lse = attend(
            q * 2, case.k, case.v, mask, return_lse=True, temperature=temperature * 3, weights=weights
        )
        return out.sin().sum() + lse.sum()

    inputs = [t.clone().requires_grad_() for t in (case.q, case.score["temperature"])]
    eager = torch.autograd.grad(loss(*inputs), inputs)
    compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*inputs), inputs)
    for found, right in zip(compiled, eager, strict=True):
        assert torch.allclose(found, right, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused_by_name(pack: aotpack.Pack) -> None:
    attend, case = pack.attention("sinks"), score_case(PACKAGED["sinks"], 1, 100, 3)
    sinks = case.score["sinks"].clone().requires_grad_()
    out = attend(case.q, case.k, case.v, attend.block_mask(**case.mask), sinks=sinks)
    (grad,) = torch.autograd.grad(out.square().sum(), sinks, create_graph=True)
    with pytest.raises(UnsupportedError, match="cannot be differentiated twice"):
        grad.sum().backward()


def test_autocast_leaves_the_scores_tensors_as_they_are(pack: aotpack.Pack) -> None:
    attend, case = pack.attention("chain"), score_case(PACKAGED["chain"], 1, 100, 5)
    score = {n: t.requires_grad_(t.is_floating_point()) for n, t in case.score.items()}
    q = case.q.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, case.k.float(), case.v, attend.block_mask(**case.mask), **score)
    out.backward(case.grad_out)
    assert out.dtype == torch.bfloat16
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    for tensor in score.values():
        assert not tensor.requires_grad or (tensor.grad is not None and tensor.grad.dtype == tensor.dtype)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": None}, "wrong tensors for its score"),
        ({"extra": torch.zeros(3)}, "wrong tensors for its score"),
        ({"temperature": torch.tensor(1.0, dtype=torch.float64)}, "wrong dtype"),
        ({"temperature": torch.zeros(1)}, "wrong shape"),
        ({"weights": torch.zeros(7)}, "does not fit"),
        ({"weights": torch.zeros(100, device="meta")}, "another device"),
        ({"weights": 3.0}, "is no tensor"),
    ],
)
def test_tensors_that_do_not_fit(pack: aotpack.Pack, change: dict[str, Any], message: str) -> None:
    attend, case = pack.attention("tempered"), score_case(PACKAGED["tempered"], 1, 100, 3)
    score = {n: t for n, t in {**case.score, **change}.items() if t is not None}
    with pytest.raises(InputError, match=message):
        attend(case.q, case.k, case.v, attend.block_mask(**case.mask), **score)


def test_attention_without_a_score_takes_no_tensors(float32_pack: aotpack.Pack) -> None:
    attend = float32_pack.attention("full")
    spec = attend.spec
    q = torch.zeros(1, spec.heads, 16, spec.head_dim)
    k = torch.zeros(1, spec.kv_heads, 48, spec.head_dim)
    mask = attend.block_mask(anchors=torch.tensor([[5]]), keep=torch.tensor([[True]]), context_len=32)
    with pytest.raises(InputError, match="wrong tensors for its score"):
        attend(q, k, k, mask, sinks=torch.zeros(spec.heads))
