from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import aotpack.demo.run
from aotpack.build import BuildReport, Stage
from aotpack.demo.run import CONFIG, max_rel_error, run_demo

EXAMPLE = Path(__file__).parents[2] / "examples" / "qwen2.5-0.5b-dflash" / "config.json"


@pytest.fixture
def prebuilt(monkeypatch, dflash_package):
    """The session's package instead of a build; gives the paths that were built."""
    paths = []

    def build(specs, targets, output, *, progress=None):
        assert list(specs) == ["full"]
        assert targets == ["cpu"]
        paths.append(output)
        shutil.copy(dflash_package, output)
        stage = Stage(target="cpu-x86_64-v3", name="forward", spec="full", seconds=1.0)
        size = output.stat().st_size
        return BuildReport(path=output, digest="0" * 64, size=size, seconds=1.5, stages=(stage,))

    monkeypatch.setattr(aotpack.demo.run, "build", build)
    return paths


def test_the_demo_is_the_example():
    assert json.loads(CONFIG.read_text()) == json.loads(EXAMPLE.read_text())


def test_the_demo_reports_what_it_did(prebuilt, dflash_package):
    data = run_demo(threads=2, steps=6)
    assert list(data) == [
        "schema", "package_bytes", "targets", "build_s", "load_ms", "first_step_ms", "threads", "traces",
        "max_rel_error", "loss",
    ]  # fmt: skip
    assert data["schema"] == "aotpack.demo/1"
    assert data["package_bytes"] == dflash_package.stat().st_size
    assert (data["targets"], data["build_s"]) == (["cpu-x86_64-v3"], 1.5)
    assert (data["threads"], data["traces"]) == (2, 0)
    assert data["load_ms"] > 0
    assert data["first_step_ms"] > 0
    assert set(data["max_rel_error"]) == {"out", "dq", "dk", "dv"}
    assert 0 < data["loss"]["last"] < data["loss"]["first"]
    json.dumps(data, allow_nan=False)


def test_the_temporary_package_is_removed(prebuilt):
    run_demo(threads=1, steps=1)
    assert not prebuilt[0].parent.exists()


def test_a_package_that_was_asked_for_stays(prebuilt, tmp_path):
    run_demo(tmp_path / "kept.aotpack", threads=1, steps=1)
    assert (tmp_path / "kept.aotpack").exists()


def test_float32_is_close_to_exact_math(float32_pack):
    assert max(max_rel_error(float32_pack.attention("full")).values()) <= 1e-5


def test_bfloat16_is_as_close_as_it_can_be(dflash_pack):
    errors = max_rel_error(dflash_pack.attention("full"))
    assert min(errors.values()) > 1e-4
    assert max(errors.values()) <= 1.5e-2
