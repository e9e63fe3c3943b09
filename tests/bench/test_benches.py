"""The benches measure what they say; how fast it was is no test's business."""

from dataclasses import replace

import pytest

from aotpack.bench import Settings, coldstart, default_specs, run
from aotpack.bench.protocol import RefusedError, run_job
from aotpack.drafter import specs_from_config
from aotpack.errors import InputError
from tests.conftest import EXAMPLES
from tests.process import aotpack, only_object

FACTS = {"torch": "2.14.1", "torch_threads": 2, "processors": 2}


@pytest.fixture
def settings(dflash_package):
    return Settings(package=dflash_package, repeat=1, context=64, anchors=4)


def rows(result):
    return [row.to_dict() for row in result.rows]


def test_the_default_spec_is_the_example():
    (spec,) = specs_from_config(EXAMPLES / "qwen2.5-0.5b-dflash").values()
    assert default_specs("bfloat16") == {"bfloat16": spec}


def test_step_compares_time_and_memory(settings):
    found = rows(run("step", settings))
    parts = ("forward+backward", "mask", "forward", "backward", "extra memory")
    ways = ("aotpack", "scaled_dot_product_attention with the dense boolean mask")
    assert [row["what"] for row in found] == [f"bfloat16 {part}, {way}" for part in parts for way in ways]
    assert [row["unit"] for row in found] == ["s"] * 8 + ["MB"] * 2
    assert all(row["value"] > 0 for row in found[:8])
    assert [row["ratio"] for row in found[:8:2]] == [1.0] * 4


def test_threads_runs_the_same_libraries_in_torchs_loader(settings):
    result = run("threads", settings)
    assert result.facts["calls"] >= 1
    assert [row["unit"] for row in rows(result)] == ["x"] * 3 + ["s"] * 4
    assert "AOTIModelPackageLoader" in rows(result)[1]["what"]


def test_a_start_of_ours_is_measured_in_a_fresh_process(dflash_package, tmp_path):
    case = {"package": str(dflash_package), "spec": "full", "context": 64, "anchors": 4}
    case |= {"backward": True, "device": "cpu"}
    answer = run_job("cold:aotpack", tmp_path, **case)
    assert answer["seconds"] > 0
    assert answer["facts"]["torch"]
    assert {path.name for path in tmp_path.iterdir()} == {"log", "store", "tmp"}


def test_coldstart_compares_training_with_training_and_forward_with_forward(settings, monkeypatch):
    def answer(job, folder, /, **arguments):
        return {"seconds": 2.0 if job == "cold:aotpack" else 8.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    result = coldstart.run(settings)
    ratios = {row["what"]: row["ratio"] for row in rows(result)}
    assert len(ratios) == 12
    assert {ratio for what, ratio in ratios.items() if what.startswith("aotpack")} == {1.0}
    assert {ratio for what, ratio in ratios.items() if not what.startswith("aotpack")} == {4.0}
    assert result.facts == {**FACTS, "dtype": "bfloat16", "batch": 1, "context": 64, "anchors": 4}


def test_coldstart_on_cuda_compares_with_every_state_of_torchs_caches(settings, monkeypatch):
    asked = []

    def answer(job, folder, /, **arguments):
        asked.append((job, folder.name, arguments.get("keep_artifacts"), arguments["device"]))
        return {"seconds": 2.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    found = rows(coldstart.run(replace(settings, device="cuda:1")))
    assert asked == [
        ("cold:aotpack", "own", None, "cuda:1"),
        ("cold:aotpack", "own", None, "cuda:1"),
        ("cold:torch_loader", "loader", None, "cuda:1"),
        ("cold:compiled_flex", "flex", True, "cuda:1"),
        ("cold:compiled_flex", "flex", None, "cuda:1"),
        ("cold:compiled_flex", "reader", None, "cuda:1"),
    ]
    assert all("forward+backward" in row["what"] for row in found)


def test_torchs_loader_makes_the_same_step(dflash_package, tmp_path):
    case = {"package": str(dflash_package), "spec": "full", "context": 64, "anchors": 4, "device": "cpu"}
    assert run_job("cold:torch_loader", tmp_path, **case)["seconds"] > 0


@pytest.mark.parametrize("name", ["step", "threads"])
def test_benches_of_the_cpu_refuse_another_device(settings, name):
    with pytest.raises(InputError, match=f"the bench {name} measures the CPU"):
        run(name, replace(settings, device="cuda"))


def test_coldstart_says_what_a_torch_without_precompile_said(settings, monkeypatch):
    def answer(job, folder, /, **arguments):
        if job == "cold:make_precompiled":
            raise RefusedError("AttributeError: no precompile")
        assert job != "cold:precompiled_dense"
        return {"seconds": 2.0, "facts": FACTS}

    monkeypatch.setattr(coldstart, "run_job", answer)
    refused = [row for row in rows(coldstart.run(settings)) if row["value"] is None]
    assert [(row["what"].rpartition(": ")[2], row["ratio"]) for row in refused] == [("no precompile", None)]


def test_coldstart_fails_where_our_own_start_fails(settings, monkeypatch):
    def answer(job, folder, /, **arguments):
        raise RefusedError("it broke")

    monkeypatch.setattr(coldstart, "run_job", answer)
    with pytest.raises(RefusedError, match="it broke"):
        coldstart.run(settings)


def test_a_job_that_fails_says_why(tmp_path):
    with pytest.raises(RefusedError, match="there is no package at /nope"):
        run_job(
            "cold:aotpack",
            tmp_path,
            package="/nope",
            spec="x",
            context=1,
            anchors=1,
            device="cpu",
            backward=True,
        )


def test_only_specs_with_a_drafters_mask_are_measured(masks_package):
    assert set(Settings(package=masks_package).specs()) == {"full", "sliding"}


def test_the_command_prints_one_object(dflash_package):
    options = ["--repeat", 1, "--context", 64, "--anchors", 4, "--package", dflash_package, "--json"]
    done = aotpack("bench", "step", *options)
    found = only_object(done)
    assert (done.returncode, found["schema"]) == (0, "aotpack.bench.step/1")
    assert set(found["rows"][0]) == {"what", "value", "unit", "ratio"}
    assert str(dflash_package) not in done.stdout


def test_a_missing_package_is_refused():
    done = aotpack("bench", "threads", "--package", "/nope")
    assert (done.returncode, done.stdout) == (2, "")
    assert "there is no package at /nope" in done.stderr


def test_a_package_that_is_not_there_is_an_input_error(tmp_path):
    with pytest.raises(InputError):
        Settings(package=tmp_path / "none.aotpack").specs()
