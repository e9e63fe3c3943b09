"""Rivals take turns in processes of their own, and one that is missing is only missing."""

import pytest

from aotpack.bench.case import Case, Shape
from aotpack.bench.protocol import RefusedError, Worker, run_job
from aotpack.bench.turns import Entry, Turns, take_turns

SHAPE = Shape(context=64, anchors=4)


@pytest.fixture
def case(dflash_package):
    return Case.of(dflash_package, "full", "cpu", SHAPE)


def entry(folder, who, *, needed=False):
    return Entry(job="steady:step", folder=folder / who, more={"who": who}, needed=needed)


def test_rivals_take_turns_and_a_missing_one_says_why(case, tmp_path):
    said = []
    known = {who: entry(tmp_path, who, needed=who == "aotpack") for who in ("aotpack", "nonsense", "sdpa")}
    found = take_turns(known, case, repeat=2, timeout=600, say=said.append)
    assert list(found) == ["aotpack", "nonsense", "sdpa"]
    assert found["nonsense"].startswith("InputError: the way is unknown")
    for who in ("aotpack", "sdpa"):
        assert isinstance(found[who], Turns)
        assert [set(turn) for turn in found[who].turns] == [{"forward", "backward"}] * 2
        assert min(found[who].of("forward")) > 0
    order = [line.split(":")[0].strip() for line in said]
    assert order == ["aotpack", "nonsense", "sdpa", "aotpack", "sdpa", "aotpack", "sdpa"]


def test_the_mask_shows_what_a_loop_over_cells_counts(case, tmp_path):
    from aotpack.bench.jobs.workload import draw

    work = draw(case)
    anchors = work.anchors[0].tolist()
    seen = [
        [kv < anchors[q // 16] if kv < 64 else (kv - 64) // 16 == q // 16 for kv in range(128)]
        for q in range(64)
    ]
    cells = sum(map(sum, seen))
    assert work.visible() == {"cells": 14 * cells, "blocks": 14}


def test_what_is_needed_ends_the_bench(case, tmp_path):
    with pytest.raises(RefusedError, match="the way is unknown"):
        take_turns(
            {"nonsense": entry(tmp_path, "nonsense", needed=True)}, case, repeat=1, timeout=600, say=print
        )


def test_a_rival_has_only_so_long(case, tmp_path):
    found = take_turns({"sdpa": entry(tmp_path, "sdpa")}, case, repeat=1, timeout=0.01, say=print)
    assert found == {"sdpa": "no answer within 0 s"}


def test_what_was_measured_before_a_failure_is_kept(case, tmp_path, monkeypatch):
    measure, calls = Worker.measure, []

    def once(worker):
        calls.append(worker)
        if len(calls) > 1:
            raise RefusedError("out of memory")
        return measure(worker)

    monkeypatch.setattr(Worker, "measure", once)
    said = []
    found = take_turns({"sdpa": entry(tmp_path, "sdpa")}, case, repeat=3, timeout=600, say=said.append)
    assert (len(found["sdpa"].turns), len(calls)) == (1, 2)
    assert said[-1] == "  sdpa: out of memory"


def test_a_process_that_dies_says_how(case, tmp_path):
    with pytest.raises(RefusedError, match=r"ended with exit code 1[\s\S]*No module named"):
        run_job("nowhere:nothing", tmp_path, case)


def test_a_worker_is_gone_when_it_is_closed(case, tmp_path):
    with Worker("steady:step", tmp_path, case, who="sdpa") as worker:
        process = worker._process
        assert process.poll() is None
    assert process.poll() is not None
