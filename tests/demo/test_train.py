from __future__ import annotations

import threading

import pytest
import torch

import aotpack
from aotpack.demo.drafter import drafting_loss
from aotpack.demo.train import Settings, train, train_threads
from aotpack.errors import InputError
from aotpack.spec import AttentionSpec, MaskSpec
from tests.demo.dense import TINY, DenseAttend

SMALL = Settings(hidden_size=32, context=(40, 60), anchors=(2, 6))


def run(threads: int, steps: int, **options):
    return train_threads([DenseAttend()] * threads, ["cpu"] * threads, steps, settings=SMALL, **options)


def test_threads_on_a_package_learn_without_a_trace(dflash_package):
    seen = []
    with aotpack.no_tracing() as watch:
        result = train(dflash_package, threads=3, steps=10, on_step=lambda *step: seen.append(step))
    assert watch.count == 0
    assert result.fall >= 0.3
    assert seen == list(enumerate(result.losses))
    assert (result.threads, result.devices) == (3, ("cpu",) * 3)
    assert result.load_ms > 0
    assert 0 < result.first_step_ms < 1e3 * result.seconds


def test_a_run_can_be_repeated():
    torch.manual_seed(99)
    first = run(2, 3)
    assert run(2, 3).losses == first.losses
    assert len(set(first.losses)) == 3


def test_every_step_and_thread_has_lengths_of_its_own():
    lengths = set()

    def loss(drafter, target, attend, batch, anchors, keep):
        lengths.add((batch.tokens.shape[1], anchors.shape[1]))
        return drafting_loss(drafter, target, attend, batch, anchors, keep)

    run(2, 4, loss=loss)
    assert len(lengths) > 4


def test_replicas_are_seen_to_be_equal_at_the_end():
    replicas = {}

    def loss(drafter, *rest):
        replicas[threading.get_ident()] = drafter
        return drafting_loss(drafter, *rest)

    run(3, 3, loss=loss)
    one, *others = replicas.values()
    assert len(others) == 2
    for other in others:
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            assert p is not q
            assert torch.equal(p, q)


def test_the_first_error_reaches_the_caller_and_no_thread_stays():
    def loss(drafter, target, attend, batch, anchors, keep):
        if threading.current_thread().name.endswith("_1"):
            raise ZeroDivisionError("in one thread")
        return drafting_loss(drafter, target, attend, batch, anchors, keep)

    with pytest.raises(ZeroDivisionError, match="in one thread"):
        run(3, 5, loss=loss)
    assert not [t for t in threading.enumerate() if t.name.startswith("drafter")]


def test_the_thread_count_of_torch_is_given_back():
    before = torch.get_num_threads()
    run(2, 1)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(("threads", "steps"), [(0, 3), (2, 0)])
def test_nothing_to_do_is_refused(threads, steps):
    with pytest.raises(InputError, match="a thread and a step"):
        run(threads, steps)


def test_a_package_of_another_mask_family_is_refused():
    causal = AttentionSpec(**{**TINY_FIELDS, "mask": MaskSpec(family="causal")})
    with pytest.raises(InputError, match="for DFlash drafters"):
        train_threads([DenseAttend(causal)], ["cpu"], 1, settings=SMALL)


TINY_FIELDS = {name: getattr(TINY, name) for name in ("heads", "kv_heads", "head_dim", "dtype")}
