"""A round of fresh trainers on this machine's CPU, and how each end of one is reported."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DEVICE = Path(__file__).parents[1] / "device"
SIZES = {"devices": "cpu", "threads": 3, "context": 64, "anchors": 4, "hidden": 32, "layers": 1, "steps": 3}
OUTCOMES = ("finished", "hung", "unfinished", "failed", "died")


@pytest.fixture(scope="module")
def host():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DEVICE)
        yield importlib.import_module("host_round")


def round_of(*options: object) -> subprocess.CompletedProcess[str]:
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", value)]
    command = [sys.executable, DEVICE / "host_round.py", *sizes, *options]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=900, check=False)


def job_of(package: Path) -> str:
    """What a trainer with aotpack and three threads is given."""
    job = {"started": 0, "who": "aotpack", "package": str(package), "spec": "full", "target": "cpu"}
    job |= {"rows": 1, "context": 64, "anchors": 4, "hidden": 32, "layers": 1, "steps": 3}
    return json.dumps({**job, "drafters": ["cpu"] * 3})


def started(host, code: str, *, timeout: float = 60):
    """How a trainer that is only these lines is reported; it has three threads."""
    said = "import json, os\ndef say(**event): print(json.dumps(event), flush=True)\n"
    watched = host.watch([sys.executable, "-c", said + code], timeout)
    return host.judge(host.OWN, watched, threads=3)


def test_every_start_trains_and_calls_make_one_table(dflash_package, tmp_path):
    kept = ("--package", dflash_package, "--save", tmp_path, "--watchdog", 300)
    done = round_of(*kept, "--starts", 2, "--rival-starts", 1)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["missed:", "  nothing"]
    more = round_of(*kept, "--only", "ours", "--starts", 1)
    assert more.returncode == 0, more.stdout + more.stderr

    data = json.loads((tmp_path / "host.json").read_text())
    assert data["schema"] == "aotpack.device.host/1"
    assert "--starts 3 --rival-starts 1 --watchdog 300" in data["command"]
    assert (data["settings"]["target"], data["settings"]["drafters"]) == ("cpu", ["cpu"] * 3)
    own, rival = data["table"]
    assert (own["starts"], own["finished"], own["equal"], own["traces"]) == (3, 3, 3, 0)
    assert own["steps"] == {"median": 3, "least": 3, "greatest": 3, "count": 3}
    assert own["first_step_s"]["count"] == own["spread_gradients_s"]["count"] == 3
    assert own["errors"] == {}
    for start in data["starts"][:2]:
        assert start["imported_s"] < start["made_s"] < min(start["loaded_s"])
        assert all(a < b for a, b in zip(start["loaded_s"], start["gradients_s"], strict=True))
        assert max(start["gradients_s"]) < min(start["first_step_s"])
        assert max(start["first_step_s"]) < start["seconds"]
        assert start["lengths"] > 3
        assert start["caches"] == []
    assert rival["who"] == "torch.compile(flex_attention)"
    assert rival["starts"] == 1 == sum(rival[name] for name in OUTCOMES)
    if not rival["finished"]:
        assert rival["errors"] or rival["hung"] or rival["unfinished"]
    assert (tmp_path / "host.txt").read_text().startswith("python tests/device/host_round.py")

    other = round_of(*kept, "--only", "ours", "--rows", 2)
    assert other.returncode == 1
    assert "was made with other settings" in other.stderr
    assert json.loads((tmp_path / "host.json").read_text()) == data


def test_a_trainer_that_hangs_says_how_far_it_came(host):
    code = """
import faulthandler, threading
faulthandler.enable()
say(event="gradients", seconds=1.5, thread=2)
say(event="step", seconds=2.5, thread=2, step=0)
threading.Event().wait()
"""
    start = started(host, code, timeout=2)
    assert (start.outcome, start.seconds) == ("hung", 2)
    assert start.gradients_s == (None, None, 1.5)
    assert start.steps == (0, 0, 1)
    assert any("wait, " in place for place in start.places)
    assert host.missed([start], 1) == [
        "start 1: hung",
        "start 1: threads trained 0, 0, 1 steps of 1",
        "start 1: None traces",
        "start 1: the replicas were not seen to be equal",
    ]
    (row,) = importlib.import_module("host_table").table([start])
    assert (row["hung"], row["finished"], row["first_step_s"]) == (1, 0, None)
    assert row["threads_with_gradients"]["greatest"] == 1


def test_work_at_the_end_of_the_time_is_not_a_hang(host):
    assert started(host, "while True: pass", timeout=2).outcome == "unfinished"


def test_a_trainer_whose_thread_raises_has_failed(host):
    code = """
say(event="raised", seconds=1.0, who="drafter 1", error="ValueError: no")
say(event="ended", seconds=1.25, traces=0)
raise SystemExit(1)
"""
    start = started(host, code)
    assert (start.outcome, start.seconds, start.errors) == ("failed", 1.25, ("drafter: ValueError: no",))
    assert "start 1: drafter: ValueError: no" in host.missed([start], 3)


def test_one_thread_that_raises_ends_the_others_and_the_target(host, dflash_package, tmp_path, monkeypatch):
    code = f"""
import sys, threading
sys.path.insert(0, {str(DEVICE)!r})
import host_trainer
real, calls = host_trainer.backward, []
def backward(*arguments):
    if threading.current_thread().name == "drafter 1":
        calls.append(0)
        if len(calls) == 2:
            raise ValueError("in one thread")
    return real(*arguments)
host_trainer.backward = backward
raise SystemExit(host_trainer.main({job_of(dflash_package)!r}))
"""
    monkeypatch.setenv("PATH", str(tmp_path))
    start = started(host, code, timeout=300)
    assert (start.outcome, start.errors) == ("failed", ("drafter: ValueError: in one thread",))
    # Another thread may still have been in the first step.
    assert start.steps[1] == 1
    assert set(start.steps) <= {0, 1}
    assert (start.traces, start.equal) == (0, False)


def test_a_trainer_that_cannot_begin_has_failed(host):
    start = started(host, "import no_such_module")
    assert (start.outcome, start.errors) == (
        "failed",
        ("ModuleNotFoundError: No module named 'no_such_module'",),
    )


def test_an_end_in_order_without_a_result_is_no_success(host):
    assert started(host, "say(event='imported', seconds=1.0)").outcome == "failed"


def test_a_trainer_that_is_killed_has_died(host):
    start = started(host, "import signal; os.kill(os.getpid(), signal.SIGSEGV)")
    assert (start.outcome, start.errors) == ("died", ("SIGSEGV",))


def test_a_compile_cache_is_seen_and_an_empty_folder_is_none(host, tmp_path):
    host.surroundings(host.OWN, tmp_path)
    (tmp_path / "inductor").mkdir()
    assert host.compile_caches(tmp_path) == ()
    (tmp_path / "inductor" / "x").write_text("")
    (tmp_path / "tmp" / "y").write_text("")
    assert host.compile_caches(tmp_path) == ("inductor", "tmp/y")


def test_only_the_rival_finds_a_compiler(host, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/usr/bin/cc")
    monkeypatch.setenv("PATH", "/usr/bin")
    own, rival = tmp_path / "own", tmp_path / "rival"
    for folder in (own, rival):
        folder.mkdir()
    found = host.surroundings(host.OWN, own)
    assert ("CC" in found, list(Path(found["PATH"]).iterdir())) == (False, [])
    found = host.surroundings(host.FLEX, rival)
    assert (found["CC"], found["PATH"]) == ("/usr/bin/cc", "/usr/bin")


def test_the_trainer_refuses_a_compiler_on_its_path(dflash_package, tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/true\n")
    compiler.chmod(0o755)
    job = {"started": 0, "who": "aotpack", "package": str(dflash_package), "spec": "full", "target": "cpu"}
    job |= {
        "drafters": ["cpu"],
        "rows": 1,
        "context": 64,
        "anchors": 4,
        "hidden": 32,
        "layers": 1,
        "steps": 1,
    }
    done = subprocess.run(
        [sys.executable, str(DEVICE / "host_trainer.py"), job_of(dflash_package)],
        env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "there are compilers on PATH: nvcc" in done.stderr
    assert "made" not in done.stdout


@pytest.mark.parametrize(
    ("devices", "threads", "expected"),
    [
        (["cuda:0", "cuda:1", "cuda:2", "cuda:3"], None, ["cuda:1", "cuda:2", "cuda:3"]),
        (["cuda:0", "cuda:1"], 3, ["cuda:1", "cuda:0", "cuda:1"]),
        (["cpu"], 3, ["cpu"] * 3),
        (["cuda:0"], None, ["cuda:0"]),
    ],
)
def test_the_targets_device_is_taken_last(host, devices, threads, expected):
    assert host.drafter_devices(devices, threads) == expected
