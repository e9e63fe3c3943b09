"""The shipping example: to a folder and to object stores, and what its node refuses."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aotpack.package import Package
from tests.process import aotpack, rewritten
from tests.servers import FileServer, s3_server

PATH = Path(__file__).parents[2] / "examples" / "ship_it.py"


def run(cwd: Path, *options: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PATH, *map(str, options)]
    added = {"PYTHONPATH": str(PATH.parents[1]), **environment}
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **added},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def shipped(dflash_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example ran with its default bucket; what it printed is in result.json."""
    folder = tmp_path_factory.mktemp("here")
    done = run(folder, "--package", dflash_package, "--json")
    assert done.returncode == 0, done.stderr
    (folder / "result.json").write_text(done.stdout)
    (folder / "commands.txt").write_text(done.stderr)
    return folder


@pytest.fixture
def copy(shipped: Path, tmp_path: Path) -> Path:
    """A copy of that folder, to do harm in."""
    return Path(shutil.copytree(shipped, tmp_path / "here")) / "ship-it"


def pull(work: Path) -> subprocess.CompletedProcess[str]:
    """The node's part alone."""
    url = f"file://{work}/bucket/drafter.aotpack"
    return run(work.parent, "--pull", url, "--key", work / "release.key.pub")


def test_a_node_runs_what_was_signed_and_reads_its_own_variant_only(shipped: Path, dflash_package: Path):
    data = json.loads((shipped / "result.json").read_text())
    assert data["schema"] == "aotpack.example.ship/1"
    assert data["url"] == f"file://{shipped}/ship-it/bucket/drafter.aotpack"
    with Package.open(dflash_package) as package:
        assert (data["digest"], data["package_bytes"]) == (package.digest, package.size)
        vectors = sum(package.manifest.blobs[v.vectors].size for v in package.manifest.variants)
    # Golden vectors are for selftest: a node that trains has no use for them.
    assert 0 < data["bytes_read"] <= data["package_bytes"] - vectors
    (signature,) = json.loads((shipped / "ship-it" / "bucket" / "drafter.aotpack.sig").read_text())[
        "signatures"
    ]
    assert data["signer"] == signature["key_id"]
    assert set(data["errors"]) == {"out", "dq", "dk", "dv"}
    assert max(data["errors"].values()) < 1e-2


def test_its_commands_are_printed_as_one_types_them(shipped: Path):
    commands = [line for line in (shipped / "commands.txt").read_text().splitlines() if "$ " in line]
    words = [
        line.partition("$ ")[0] + ":" + line.partition("aotpack ")[2].partition(" ")[0] for line in commands
    ]
    assert words == ["here:keygen", "here:sign", "here:push", "node:pull", "node:"]
    assert "AOTPACK_OFFLINE=1 " in commands[-1]


def test_the_node_alone_and_a_second_release(copy: Path, dflash_package: Path):
    alone = pull(copy)
    assert alone.returncode == 0, alone.stderr
    assert "signed by    " in alone.stdout
    again = run(copy.parent, "--package", dflash_package)
    assert again.returncode == 0, again.stderr
    assert "keygen" not in again.stderr


@pytest.mark.parametrize("harm", ["unsigned", "signed by another", "another package", "altered"])
def test_what_the_key_did_not_sign_is_refused(harm: str, copy: Path):
    package = copy / "bucket" / "drafter.aotpack"
    signature = package.with_name("drafter.aotpack.sig")
    if harm == "altered":
        data = bytearray(package.read_bytes())
        for place in range(200, len(data) - 200, 1000):
            data[place] ^= 1
        package.write_bytes(data)
    elif harm == "another package":
        package.unlink()
        rewritten(copy / "drafter.aotpack", package, tolerance=0.5)
    else:
        signature.unlink()
        if harm == "signed by another":
            assert aotpack("keygen", "-o", copy / "other.key").returncode == 0
            assert aotpack("sign", package, "--key", copy / "other.key").returncode == 0
    done = pull(copy)
    assert (done.returncode, done.stdout) == (4, "")
    assert ("is not trusted" in done.stderr) == (harm != "altered")
    assert "Traceback" not in done.stderr


def test_a_bucket_of_s3(dflash_package: Path, tmp_path: Path):
    with s3_server("bucket") as environment:
        done = run(
            tmp_path,
            "--bucket",
            "s3://bucket/some/drafters/",
            "--package",
            dflash_package,
            "--json",
            **environment,
        )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["url"] == "s3://bucket/some/drafters/drafter.aotpack"
    assert data["bytes_read"] < data["package_bytes"]


def test_a_server_of_files(dflash_package: Path, tmp_path: Path):
    with FileServer() as server:
        done = run(tmp_path, "--bucket", server.url("/drafters"), "--package", dflash_package, "--json")
    assert done.returncode == 0, done.stderr
    assert sorted(server.files) == ["/drafters/drafter.aotpack", "/drafters/drafter.aotpack.sig"]
    assert server.files["/drafters/drafter.aotpack"] == dflash_package.read_bytes()


def test_a_bucket_that_cannot_be_written_is_an_error_of_ours(dflash_package: Path, tmp_path: Path):
    with FileServer() as server:
        done = run(tmp_path, "--bucket", server.url("/refused"), "--package", dflash_package)
    assert done.returncode == 5
    assert "/refused/drafter.aotpack cannot be written" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_it_builds_signs_and_ships_as_printed(tmp_path: Path):
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "here$ aotpack build " in done.stderr
    assert "node loaded  cpu-x86_64-v3, offline" in done.stdout
