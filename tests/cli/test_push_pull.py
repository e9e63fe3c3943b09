"""push and pull, as processes."""

import fcntl
import json
import os
import pty
import signal
import subprocess
import time
from pathlib import Path

import pytest

from aotpack.package import Package
from aotpack.store import Store
from tests.process import COMMAND, aotpack, only_object
from tests.servers import FileServer

TINY = Path(__file__).parents[1] / "package" / "assets" / "tiny.aotpack"
CPU = "cpu-x86_64-v3"


@pytest.fixture
def server():
    with FileServer(files={"/tiny.aotpack": TINY.read_bytes()}) as server:
        yield server


@pytest.fixture
def url(server):
    return server.url("/tiny.aotpack")


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path / "store"))
    return tmp_path / "store"


def front_and_frames():
    """Bytes of the front, and of each frame that the CPU's variant needs."""
    with Package.open(TINY) as package:
        blobs = package.manifest.blobs
        keys = set(package.manifest.variants[0].code)
        keys |= {blobs[key].dictionary for key in keys if blobs[key].dictionary}
        front = package.size - sum(blob.size for blob in blobs.values())
        return front, sorted(blobs[key].size for key in keys)


def kinds(root):
    return sorted({path.relative_to(root).parts[0] for path in root.rglob("*") if path.is_file()})


def wait_for(met):
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_push_then_push_again(server, tmp_path):
    url = server.url("/new.aotpack")
    first = only_object(aotpack("push", TINY, url, "--json"))
    with Package.open(TINY) as package:
        assert first == {
            "schema": "aotpack.push/1",
            "path": str(TINY),
            "url": url,
            "digest": package.digest,
            "targets": [CPU, "cuda-sm90"],
            "bytes": package.size,
            "already_there": False,
            "signed": False,
        }
    done = aotpack("push", TINY, url)
    assert (done.returncode, done.stdout) == (0, f"already there: {url}\ndigest {first['digest']}\n")
    assert server.files["/new.aotpack"] == TINY.read_bytes()


def test_push_replaces_nothing_unasked(server, dflash_package, url):
    done = aotpack("push", dflash_package, url, "--json")
    assert (done.returncode, only_object(done)["error"]) == (2, "OutputError")
    assert server.files["/tiny.aotpack"] == TINY.read_bytes()
    assert aotpack("push", dflash_package, url, "--force").returncode == 0
    assert server.files["/tiny.aotpack"] == dflash_package.read_bytes()


def test_push_to_a_path_is_refused(tmp_path):
    done = aotpack("push", TINY, tmp_path / "x")
    assert done.returncode == 2
    assert "is not a URL" in done.stderr


def test_pull_fills_the_store_for_a_target(server, url, root):
    found = only_object(aotpack("pull", url, "--target", CPU, "--json"))
    front, frames = front_and_frames()
    with Package.open(TINY) as package:
        assert found == {
            "schema": "aotpack.pull/1",
            "url": url,
            "digest": package.digest,
            "targets": [CPU],
            "path": str(root),
            "signed": False,
            "bytes_read": front + sum(frames),
        }
    assert server.sent == front + sum(frames)
    again = aotpack("pull", url, "--target", CPU, "--json", AOTPACK_OFFLINE="1")
    assert only_object(again)["bytes_read"] == 0


def test_pull_offline_of_what_was_never_pulled_exits_6(url):
    done = aotpack("pull", url, "--target", CPU, "--json", AOTPACK_OFFLINE="1")
    assert (done.returncode, only_object(done)["error"]) == (6, "OfflineError")


def test_pull_of_a_target_that_is_not_there_names_those_that_are(url):
    done = aotpack("pull", url, "--target", "cuda-sm80", "--json")
    assert done.returncode == 3
    assert only_object(done)["found"] == f"{CPU}, cuda-sm90"


def test_inspect_reads_the_index_alone(server, url):
    found = only_object(aotpack("inspect", url, "--json"))
    assert (found["path"], found["bytes"]) == (url, TINY.stat().st_size)
    assert server.sent == front_and_frames()[0]


def test_pull_from_the_hub(server, tmp_path):
    listed = {"type": "file", "path": "x.aotpack", "size": TINY.stat().st_size, "oid": "0" * 40}
    server.files = {
        "/api/models/owner/name": b'{"id": "owner/name", "private": false, "downloads": 0, "tags": []}',
        "/api/models/owner/name/tree/main": json.dumps([listed]).encode(),
        "/owner/name/resolve/main/x.aotpack": TINY.read_bytes(),
    }
    hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.port}", "HF_HOME": str(tmp_path / "hub")}
    front, frames = front_and_frames()
    url = "hf://owner/name/x.aotpack"
    found = only_object(aotpack("pull", url, "--target", CPU, "--json", **hub))
    assert (found["url"], found["bytes_read"]) == (url, front + sum(frames))
    assert sum(r.sent for r in server.requests if r.path.endswith(".aotpack")) == front + sum(frames)
    missing = aotpack("pull", "hf://owner/nothing/x.aotpack", "--target", CPU, **hub)
    assert missing.returncode == 2
    assert "there is no package at hf://owner/nothing/x.aotpack" in missing.stderr


def test_pull_for_this_machine_is_enough_to_run_offline(server, dflash_package):
    server.files["/dflash"] = dflash_package.read_bytes()
    assert only_object(aotpack("pull", server.url("/dflash"), "--json"))["targets"] == [CPU]
    code = f"import aotpack; print(aotpack.load({server.url('/dflash')!r}, offline=True).target)"
    done = subprocess.run([*COMMAND[:1], "-c", code], capture_output=True, text=True)
    assert done.stdout == f"{CPU}\n", done.stderr


def test_pull_to_a_file(url, server, tmp_path, root):
    server.files["/tiny.aotpack.sig"] = b"{}"
    path = tmp_path / "x.aotpack"
    found = only_object(aotpack("pull", url, "-o", path, "--json"))
    assert path.read_bytes() == TINY.read_bytes()
    assert (tmp_path / "x.aotpack.sig").read_bytes() == b"{}"
    assert (found["path"], found["signed"], found["bytes_read"]) == (str(path), True, TINY.stat().st_size)
    assert not root.exists()


def test_pull_of_all_for_one_target_is_refused(url, tmp_path):
    assert aotpack("pull", url, "-o", tmp_path / "x", "--target", CPU).returncode == 2


def test_secrets_of_a_url_are_neither_said_nor_kept(server, root):
    url = f"http://user:hush@127.0.0.1:{server.port}/tiny.aotpack?X-Amz-Signature=hush"
    done = aotpack("pull", url, "--target", CPU, "-v")
    assert done.returncode == 0
    failed = aotpack("pull", url.replace("tiny", "nothing"), "-v")
    assert failed.returncode == 2
    assert "hush" not in done.stdout + done.stderr + failed.stdout + failed.stderr
    assert not [p for p in root.rglob("*") if p.is_file() and b"hush" in p.read_bytes()]


@pytest.mark.parametrize("to_file", [False, True])
def test_a_pull_that_was_killed_goes_on(server, url, root, tmp_path, to_file):
    where = ["-o", str(tmp_path / "x.aotpack")] if to_file else ["--target", CPU]
    # HEAD, the header, the front and two frames go well.
    server.faults, server.always = [""] * 5, "stall"
    killed = subprocess.Popen([*COMMAND, "pull", url, *where], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_for(lambda: len(server.requests) >= 6)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    server.always = ""
    before = server.sent
    found = only_object(aotpack("pull", url, *where, "--json"))
    whole = TINY.stat().st_size if to_file else sum(front_and_frames()[1])
    left = server.sent - before
    assert left == found["bytes_read"] < whole
    if to_file:
        assert sorted(path.name for path in tmp_path.iterdir()) == ["x.aotpack"]
        assert (tmp_path / "x.aotpack").read_bytes() == TINY.read_bytes()
    else:
        assert left == 48 + whole - (before - front_and_frames()[0])
        assert kinds(root) == ["fronts", "locks", "urls", "variants"]
        assert Store().verify(Store().entries()[0].digest) == []


def test_an_interrupted_pull_exits_130_and_says_so(server, url):
    server.faults, server.always = [""] * 4, "stall"
    command = [*COMMAND, "pull", url, "--target", CPU]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: len(server.requests) >= 5)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err.strip()) == (130, "", "aotpack: interrupted")


def test_progress_is_drawn_on_a_terminal_only(server, url, tmp_path):
    assert aotpack("pull", url, "-o", tmp_path / "x").stderr == ""
    own, other = pty.openpty()
    server.files["/tiny.aotpack"] = TINY.read_bytes()
    done = subprocess.run([*COMMAND, "pull", url, "--target", CPU], stdout=subprocess.PIPE, stderr=other)
    os.close(other)
    fcntl.fcntl(own, fcntl.F_SETFL, os.O_NONBLOCK)
    drawn = os.read(own, 10000)
    assert done.returncode == 0
    assert drawn.startswith(b"\r\x1b[2K")
    assert drawn.endswith(b"\r\x1b[2K")
