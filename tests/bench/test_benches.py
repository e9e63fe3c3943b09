"""The benches measure what they say; how fast it was is no test's business."""

import json
from dataclasses import replace

import pytest

from aotpack import bench
from aotpack.bench import BENCHES, NAMES, Settings, coldstart, compare, default_specs, run, run_all
from aotpack.bench.case import Case, Shape
from aotpack.bench.protocol import RefusedError, Timing, run_job
from aotpack.bench.results import Result, against
from aotpack.bench.turns import Turns
from aotpack.drafter import specs_from_config
from aotpack.errors import InputError
from tests.conftest import EXAMPLES
from tests.process import aotpack, only_object

FACTS = {"torch": "2.14.1", "torch_threads": 2, "processors": 2}
COMPILERS = frozenset({"compiled-dense", "flex", "mask-compiled", "precompile"})
DENSE = NAMES["sdpa"]


@pytest.fixture(autouse=True)
def _calm(monkeypatch):
    """Threads that wait must not keep another process from the processor."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")


@pytest.fixture
def settings(dflash_package):
    return Settings(package=dflash_package, repeat=1, context=64, anchors=4, without=COMPILERS)


@pytest.fixture
def case(dflash_package):
    return Case.of(dflash_package, "full", "cpu", Shape(context=64, anchors=4))


def rows(result):
    return [row.to_dict() for row in result.rows]


def groups(result):
    """Who is in each group."""
    found = {}
    for row in result.rows:
        found.setdefault(row.group, []).append(row.who)
    return found


def test_the_default_spec_is_the_example():
    (spec,) = specs_from_config(EXAMPLES / "qwen2.5-0.5b-dflash").values()
    assert default_specs("bfloat16") == {"bfloat16": spec}


def test_step_compares_times_and_rates(settings):
    result = run("step", settings)
    parts = ("forward+backward", "forward", "backward", "forward rate", "backward rate")
    assert groups(result) == {f"bfloat16 {part}": ["aotpack", DENSE] for part in parts}
    assert [row.unit for row in result.rows] == ["s"] * 6 + ["TFLOP/s"] * 4
    assert all(row.value > 0 for row in result.rows)
    assert {row.ratio for row in result.rows if row.own} == {1.0}
    # A rate is work over time, so its ratio is the other way up.
    times, rates = result.rows[3], result.rows[7]
    assert times.ratio * rates.ratio == pytest.approx(1, rel=0.01)


def test_mask_compares_with_create_block_mask(settings):
    result = run("mask", settings)
    assert groups(result) == {"block mask B 1 S 64 N 4": ["aotpack", "create_block_mask"]}
    assert all(row.value > 0 and row.unit == "s" for row in result.rows)


def test_memory_compares_peaks(settings):
    result = run("memory", replace(settings, context=512, anchors=32))
    assert groups(result) == {"bfloat16 B 1 S 512 N 32 extra memory": ["aotpack", DENSE]}
    assert [row.unit for row in result.rows] == ["MB"] * 2
    assert result.rows[0].value > 0


def test_overhead_is_compared_with_the_bare_programs(settings):
    result = run("overhead", settings)
    ways, calls = ["aotpack", DENSE], ("forward call", "backward call")
    assert groups(result) == {
        **{f"call overhead, {call}": [*ways, NAMES["nothing"], NAMES["torch-loader"]] for call in calls},
        "call overhead, block mask call": [*ways, NAMES["torch-loader"]],
        **{f"call overhead beyond autograd and launches, {call}": ["aotpack"] for call in calls},
    }
    assert {row.unit for row in result.rows} == {"us"}


def test_scaling_counts_the_visible_blocks(settings):
    result = run("scaling", replace(settings, context=1024))
    assert groups(result) == {
        "S 512 forward+backward": ["aotpack", DENSE],
        "S 1024 forward+backward": ["aotpack", DENSE],
        "per visible block": ["aotpack at S 512", "aotpack at S 1024"],
    }
    shown = result.facts["visible blocks"]
    # N grows with S, so four times the grid.
    assert 2 < shown["1024"] / shown["512"] < 4
    seconds, each = result.rows[0].value, result.rows[4].value
    assert each == pytest.approx(1e6 * seconds / shown["512"], rel=1e-4)


def test_train_compares_whole_steps_and_first_ones(settings):
    result = run("train", settings)
    firsts = ["aotpack, nothing unpacked yet", "aotpack, unpacked by an earlier process"]
    assert groups(result) == {
        "whole training step": ["aotpack", DENSE],
        "first training step": firsts,
        "first training step beyond a later one": firsts,
    }
    # Of so short a step the difference may be anything.
    assert all(row.value > 0 for row in result.rows if "beyond" not in row.group)


def test_size_adds_up(settings):
    result = run("size", settings)
    sizes = {(row.group, row.who): row.value for row in result.rows}
    own = sizes["one variant", "aotpack"]
    parts = {who: size for (group, who), size in sizes.items() if group == "parts"}
    names = ("index", "block_mask", "forward", "backward", "vectors", "dictionaries")
    assert sum(parts[f"aotpack: {name}"] for name in names) == pytest.approx(own, rel=1e-4)
    assert parts["aotpack: whole file, 1 specs and 1 variants"] == pytest.approx(own, rel=1e-4)
    assert sizes["one variant", "torch's .pt2 files, same libraries"] > own


def test_a_jobs_arguments_may_have_any_name(case, tmp_path):
    with pytest.raises(RefusedError, match="unexpected keyword argument 'folder'"):
        run_job("sizes:package", tmp_path, case, folder="x")


@pytest.mark.slow
def test_size_knows_what_compilers_leave(settings):
    result = run("size", replace(settings, without=frozenset()))
    sizes = {row.who: row.value for row in result.rows if row.group == "one variant"}
    assert sizes["torch.compiler.precompile's two files, dense attention"] > 0
    assert sizes["torch.compile's mega-cache, dense attention"] > 0


def test_threads_runs_the_same_libraries_in_torchs_loader(settings):
    result = run("threads", settings)
    assert result.facts["calls"] >= 1
    assert [row["unit"] for row in rows(result)] == ["x"] * 3 + ["s"] * 4
    assert "AOTIModelPackageLoader" in rows(result)[1]["what"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["step", "memory", "size", "train"])
def test_compiled_rivals_are_measured_too(settings, name):
    result = run(name, replace(settings, without=frozenset()))
    compiled = [row for row in result.rows if "torch.compile" in row.who]
    assert compiled
    assert all(row.refused is None and row.value > 0 for row in compiled)


def test_a_start_of_ours_is_measured_in_a_fresh_process(case, tmp_path):
    answer = run_job("cold:aotpack", tmp_path, case, backward=True)
    assert answer["seconds"] > 0
    assert answer["facts"]["torch"]
    assert {path.name for path in tmp_path.iterdir()} == {"log", "store", "tmp"}


def test_coldstart_compares_training_with_training_and_forward_with_forward(settings, monkeypatch):
    def answer(job, folder, case, /, **arguments):
        return {"seconds": 2.0 if job == "cold:aotpack" else 8.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    result = coldstart.run(replace(settings, without=frozenset()))
    ratios = {row["what"]: row["ratio"] for row in rows(result)}
    assert len(ratios) == 13
    assert {ratio for what, ratio in ratios.items() if what.startswith("aotpack")} == {1.0}
    assert {ratio for what, ratio in ratios.items() if not what.startswith("aotpack")} == {4.0}
    shape = {"batch": 1, "context": 64, "anchors": 4}
    assert result.facts == {**FACTS, "dtype": "bfloat16", "repeat": 1, **shape}


def test_coldstart_on_cuda_compares_with_every_state_of_torchs_caches(settings, monkeypatch):
    asked = []

    def answer(job, folder, case, /, **arguments):
        asked.append((job, folder.name, arguments.get("keep_artifacts"), case.device))
        return {"seconds": 2.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    found = rows(coldstart.run(replace(settings, device="cuda:1", without=frozenset())))
    assert asked == [
        ("cold:aotpack", "own", None, "cuda:1"),
        ("cold:aotpack", "own", None, "cuda:1"),
        ("cold:torch_loader", "loader", None, "cuda:1"),
        ("cold:compiled_flex", "flex", True, "cuda:1"),
        ("cold:compiled_flex", "flex", None, "cuda:1"),
        ("cold:compiled_flex", "reader", None, "cuda:1"),
    ]
    assert all("forward+backward" in row["what"] for row in found)


def test_coldstart_leaves_out_what_it_is_told_to(settings, monkeypatch):
    asked = []

    def answer(job, folder, case, /, **arguments):
        asked.append(job)
        return {"seconds": 2.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    coldstart.run(settings)
    assert set(asked) == {"cold:aotpack", "cold:torch_loader", "cold:eager_dense"}


def test_step_on_cuda_has_every_compiler_and_the_ceiling(settings, monkeypatch):
    def said(entries, case, **options):
        assert (case.device, case.batch, case.context, case.anchors) in [
            ("cuda", 1, 4096, 512),
            ("cuda", 4, 3072, 512),
        ]
        own = {"facts": {**FACTS, "device": "a GPU"}, "cells": 10**9}
        return {
            who: Turns(info={"rate": "FLOP/s"}, turns=[{"forward": 5e14, "backward": 4e14}])
            if who == "cudnn"
            else Turns(info=own, turns=[{"forward": 1e-3, "backward": 4e-3}])
            for who in entries
        }

    monkeypatch.setattr(compare, "take_turns", said)
    asked = replace(settings, device="cuda", context=None, anchors=None, without=frozenset())
    result = run("step", asked)
    found = groups(result)
    ways = [NAMES[who] for who in ("aotpack", "flex", "flex-dynamic", "flex-autotune", "sdpa")]
    where = "bfloat16 B 4 S 3072 N 512"
    assert found[f"{where} backward"] == found[f"{where} backward share of the ceiling"] == ways
    assert found[f"{where} forward rate"] == [*ways, NAMES["cudnn"]]
    values = {row.what: row.value for row in result.rows}
    # 10**9 cells of 64 numbers, two products in forward and five in backward, two operations each.
    assert values[f"{where} forward rate, aotpack"] == 4 * 64 * 1e9 / 1e-3 / 1e12
    assert values[f"{where} backward rate, aotpack"] == 10 * 64 * 1e9 / 4e-3 / 1e12
    assert values[f"{where} forward rate, {NAMES['cudnn']}"] == 500
    assert values[f"{where} forward share of the ceiling, aotpack"] == pytest.approx(256 / 500)


def test_torchs_loader_makes_the_same_step(case, tmp_path):
    assert run_job("cold:torch_loader", tmp_path, case)["seconds"] > 0


def test_a_bench_of_the_cpu_refuses_another_device(settings):
    with pytest.raises(InputError, match="the bench threads measures the CPU"):
        run("threads", replace(settings, device="cuda"))


def test_coldstart_says_what_a_torch_without_precompile_said(settings, monkeypatch):
    def answer(job, folder, case, /, **arguments):
        if job == "cold:make_precompiled":
            raise RefusedError("AttributeError: no precompile")
        assert job != "cold:precompiled_dense"
        return {"seconds": 2.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    found = rows(coldstart.run(replace(settings, without=frozenset())))
    refused = [row for row in found if row["value"] is None]
    assert [(row["what"].rpartition(": ")[2], row["ratio"]) for row in refused] == [("no precompile", None)]


def test_coldstart_fails_where_our_own_start_fails(settings, monkeypatch):
    def answer(job, folder, case, /, **arguments):
        raise RefusedError("it broke")

    monkeypatch.setattr(coldstart, "run_job", answer)
    with pytest.raises(RefusedError, match="it broke"):
        coldstart.run(settings)


def test_a_job_that_fails_says_why(case, tmp_path):
    with pytest.raises(RefusedError, match="there is no package at /nope"):
        run_job("cold:aotpack", tmp_path, replace(case, package="/nope"), backward=True)


def test_only_specs_with_a_drafters_mask_are_measured(masks_package):
    assert set(Settings(package=masks_package).specs()) == {"full", "sliding"}
    assert set(Settings(package=masks_package, spec="sliding").specs()) == {"sliding"}
    with pytest.raises(InputError, match="has nothing that can be measured"):
        Settings(package=masks_package, spec="causal").specs()


def test_asked_lengths_take_the_place_of_a_benchs_own(settings):
    own = (Shape(context=512, anchors=512), Shape(batch=4, context=3072, anchors=512))
    plain = replace(settings, context=None, anchors=None)
    assert plain.shapes(own, ()) == own
    assert replace(plain, batch=2).shapes(own, ()) == (Shape(batch=2, context=512, anchors=512),)
    assert replace(plain, device="cuda").shapes((), own) == own


def result(name):
    rows = against("part", {"aotpack": Timing.of([1.0]), "them": Timing.of([3.0])})
    return Result(name=name, measured="seconds", rows=tuple(rows), facts=FACTS)


def test_all_goes_on_where_one_bench_fails(settings, monkeypatch):
    def broken(settings):
        raise RefusedError("no such kernel")

    names = ("mask", "step", "threads")
    benches = {name: lambda settings, name=name: result(name) for name in names} | {"step": broken}
    monkeypatch.setattr(bench, "BENCHES", benches)
    seen, said = [], []
    report = run_all(replace(settings, device="cuda", say=said.append), seen.append)
    found = report.to_dict()
    assert [each.name for each in seen] == ["mask"]
    assert [(row["what"], row["ratio"]) for row in found["rows"]] == [
        ("mask: part, aotpack", 1.0),
        ("mask: part, them", 3.0),
    ]
    assert found["mask"] == {"measured": "seconds", "facts": FACTS}
    assert (found["failed"], found["left_out"]) == ({"step": "no such kernel"}, ["threads"])
    assert said == ["threads is left out: it measures the CPU", "step failed: no such kernel"]


def test_the_command_prints_one_object_and_keeps_it(dflash_package, tmp_path):
    options = ["--repeat", 1, "--context", 64, "--anchors", 4, "--package", dflash_package, "--json"]
    options += ["--save", tmp_path / "kept", "--plot", tmp_path / "step.png", "--without", "compiled-dense"]
    done = aotpack("bench", "step", *options)
    found = only_object(done)
    assert (done.returncode, found["schema"]) == (0, "aotpack.bench.step/1")
    assert {"what", "value", "unit", "ratio"} <= set(found["rows"][0])
    assert str(dflash_package) not in done.stdout
    assert json.loads((tmp_path / "kept" / "step.json").read_text()) == found
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_package_is_refused():
    done = aotpack("bench", "threads", "--package", "/nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no package at /nope" in done.stderr


def test_an_unknown_rival_is_refused():
    done = aotpack("bench", "step", "--without", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'nobody' is not one of 'flex'" in done.stderr


def test_a_package_that_is_not_there_is_an_input_error(tmp_path):
    with pytest.raises(InputError):
        Settings(package=tmp_path / "none.aotpack").specs()


def test_every_bench_is_in_the_commands_help():
    said = aotpack("bench", "--help").stdout
    assert all(f"\n  {name} " in said for name in (*BENCHES, "all"))


def kept(folder, name="step", **changes):
    """A file as ``--save`` leaves it."""
    timings = {
        "aotpack": Timing.of([1.0, 2.0]),
        "them": Timing.of([-6.0]),
        "others": "RuntimeError: not: here",
    }
    told = Result(name=name, measured="seconds", rows=tuple(against("part", timings)), facts=FACTS)
    path = folder / f"{name}.json"
    told.write(path)
    if changes:
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path, told


def test_a_kept_result_is_read_as_it_was(tmp_path):
    path, told = kept(tmp_path)
    assert Result.read(path) == told
    assert Result.read(path).rows[2].refused == "RuntimeError: not: here"


def test_kept_results_are_shown_and_drawn_again(tmp_path):
    (step, told), (mask, _) = kept(tmp_path), kept(tmp_path, "mask")
    one = only_object(aotpack("bench", "step", "--from", step, "--json"))
    assert one == {"schema": "aotpack.bench.step/1", **told.to_dict()}
    both = ["--from", step, "--from", mask, "--plot", tmp_path / "both.png"]
    found = only_object(aotpack("bench", "all", *both, "--json"))
    assert found["schema"] == "aotpack.bench.all/1"
    assert [row["what"].partition(":")[0] for row in found["rows"]] == ["step"] * 3 + ["mask"] * 3
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "files", "code", "said"),
    [
        ("mask", ["step"], 2, "found: a result of step"),
        ("all", ["step", "step"], 2, "found: a result of step, the second"),
        ("step", ["nothing"], 2, "there is no result at"),
    ],
)
def test_files_that_were_not_asked_for_are_refused(tmp_path, name, files, code, said):
    kept(tmp_path)
    given = [part for file in files for part in ("--from", tmp_path / f"{file}.json")]
    done = aotpack("bench", name, *given)
    assert (done.returncode, done.stdout) == (code, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": "aotpack.bench/1"}, "field 'schema' is wrong"),
        ({"rows": [{"value": "fast"}]}, "field 'rows[0].group' is wrong"),
        ({"more": 1}, "field 'more' is wrong"),
    ],
)
def test_a_file_that_is_no_result_names_the_field(tmp_path, changes, said):
    path, _ = kept(tmp_path, **changes)
    done = aotpack("bench", "step", "--from", path)
    assert (done.returncode, done.stdout) == (4, "")
    assert said in done.stderr
