"""distributed.load among real processes with gloo, of torchrun, of torch.multiprocessing and of our own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import aotpack
from aotpack.errors import InputError
from aotpack.integrations import distributed
from aotpack.package import Package
from tests.servers import FileServer

ROOT = Path(__file__).parents[2]
JOB = [sys.executable, "-m", "tests.integrations.job"]
Said = dict[str, list[dict[str, Any]]]


def environment(**extra: object) -> dict[str, str]:
    named = {name: str(value) for name, value in extra.items()}
    kept = {n: v for n, v in os.environ.items() if n not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **named}


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield one.getsockname()[1]


def sorted_lines(out: str) -> Said:
    """What each scenario's ranks printed, by rank."""
    found: Said = {}
    for line in out.splitlines():
        if line.startswith("{"):
            said = json.loads(line)
            found.setdefault(said["scenario"], []).append(said)
    return {name: sorted(lines, key=lambda said: said["rank"]) for name, lines in found.items()}


def job(*scenarios: str, ranks: int, init_method: str, **extra: object) -> tuple[Said, list[int]]:
    """Starts the ranks as processes of their own; what they printed, and their exit codes."""
    common = {"WORLD_SIZE": ranks, "INIT_METHOD": init_method, **extra}
    started = [
        subprocess.Popen(
            [*JOB, *scenarios], cwd=ROOT, env=environment(RANK=rank, **common),
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ended = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert any(out for out, _ in ended), "".join(err for _, err in ended)
    return sorted_lines("".join(out for out, _ in ended)), [process.returncode for process in started]


@pytest.fixture
def packages(float32_package: Path, dflash_package: Path, tmp_path: Path) -> dict[str, Path]:
    damaged = tmp_path / "damaged.aotpack"
    data = bytearray(float32_package.read_bytes())
    with Package.open(float32_package) as package:
        blobs = package.manifest.blobs
        front = package.size - max(blob.offset + blob.size for blob in blobs.values())
        data[front + blobs[package.manifest.variants[0].code[0]].offset] ^= 1
    damaged.write_bytes(data)
    return {"PACKAGE": float32_package, "OTHER": dflash_package, "DAMAGED": damaged}


def test_all_ranks_get_their_pack_or_each_says_which_rank_failed(packages, tmp_path):
    scenarios = (
        "damaged", "option", "last_has_no_device", "different", "subgroup", "two_nodes", "steps",
        "step_fails", "healthy", "absent",
    )  # fmt: skip
    said, codes = job(*scenarios, ranks=3, init_method=f"file://{tmp_path}/store", **packages)
    assert codes == [0, 0, 0]
    digest = aotpack.load(packages["PACKAGE"]).digest

    first, *others = said["damaged"]
    assert (first["error"], "was altered" in first["message"]) == ("IntegrityError", True)
    for other in others:
        assert other["error"] == "RankError"
        assert other["message"].startswith("rank 0 failed in aotpack.integrations.distributed.load")
        assert "IntegrityError" in other["message"]
        assert "was altered" in other["message"]

    first, *others = said["option"]
    assert first["error"] == "MismatchError"
    assert all("MismatchError: the package was built for another" in other["message"] for other in others)

    *others, last = said["last_has_no_device"]
    assert last["error"] == "NoVariantError"
    assert all(other["message"].startswith("rank 2 failed") for other in others)

    assert {line["error"] for line in said["different"]} == {"IntegrityError"}
    assert all("the ranks loaded different packages" in line["message"] for line in said["different"])

    for name in ("subgroup", "two_nodes", "healthy"):
        assert [line["digest"] for line in said[name]] == [digest] * 3, name
    assert [line["device"] for line in said["healthy"]] == ["cpu"] * 3

    assert len({tuple(line["seconds"]) for line in said["steps"]}) == 1
    seconds = said["steps"][0]["seconds"]
    assert len(seconds) == 3
    assert said["steps"][0]["spread"] == max(seconds) - min(seconds) >= 0

    assert said["step_fails"][1]["error"] == "ArithmeticError"
    for rank in (0, 2):
        assert said["step_fails"][rank]["message"].startswith("rank 1 failed in the first step")
        assert "ArithmeticError: loss is nan" in said["step_fails"][rank]["message"]

    for line in said["absent"][:2]:
        assert line["error"] == "RankError"
        assert line["message"].startswith("rank 2 did not come in")
        assert "within 4 s" in line["message"]


def test_a_fetching_rank_that_is_killed_is_named(packages, tmp_path):
    said, codes = job("killed", ranks=2, init_method=f"file://{tmp_path}/store", **packages)
    assert codes == [-9, 0]
    (line,) = said["killed"]
    assert (line["rank"], line["error"]) == (1, "RankError")
    assert line["message"].startswith("rank 0 did not come in")


def test_a_store_that_dies_with_its_rank_is_an_error_of_ours(packages):
    with free_port() as port:
        pass
    said, codes = job("killed", ranks=2, init_method=f"tcp://127.0.0.1:{port}", **packages)
    assert codes[0] == -9
    assert said["killed"][0]["error"] == "RankError"
    assert "does not answer" in said["killed"][0]["message"]


def test_a_rank_that_fails_and_ends_with_the_store_is_heard_before(packages):
    with free_port() as port:
        pass
    said, _ = job("damaged", ranks=2, init_method=f"tcp://127.0.0.1:{port}", **packages)
    assert said["damaged"][1]["message"].startswith("rank 0 failed")


def test_one_rank_of_a_node_fetches(packages, tmp_path, monkeypatch):
    data = packages["PACKAGE"].read_bytes()
    with FileServer(files={"/one.aotpack": data}) as server:
        monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path / "alone"))
        aotpack.load(server.url("/one.aotpack"))
        cold = server.sent
        server.requests.clear()
        said, codes = job(
            "healthy", ranks=3, init_method=f"file://{tmp_path}/store",
            PACKAGE=server.url("/one.aotpack"), AOTPACK_CACHE=tmp_path / "cache",
        )  # fmt: skip
    assert codes == [0, 0, 0]
    assert len({line["digest"] for line in said["healthy"]}) == 1
    # The ranks that waited read the header each, to see that the package is still the same.
    assert server.sent == cold + 2 * 48


def test_torchrun_and_spawn_start_it_too(packages, tmp_path):
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for command, extra in (
        ([*run, "-m", "tests.integrations.job", "healthy"], {}),
        ([*JOB, "healthy"], {"SPAWN": 2, "INIT_METHOD": f"file://{tmp_path}/spawned"}),
    ):
        done = subprocess.run(
            command, cwd=ROOT, env=environment(**packages, **extra), capture_output=True, text=True,
            timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert [line["device"] for line in sorted_lines(done.stdout)["healthy"]] == ["cpu", "cpu"]


def test_a_job_of_one_process_needs_no_group(float32_package, monkeypatch):
    assert distributed.load(float32_package).device.type == "cpu"
    with distributed.first_step() as found:
        pass
    assert len(found.seconds) == 1
    assert found.spread == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="there is no process group yet"):
        distributed.load(float32_package)
