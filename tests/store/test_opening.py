"""A package behind URLs: what is read, what is kept, what is refused."""

import hashlib
import os
import subprocess
import sys
import warnings

import pytest

from aotpack.errors import HostError, InputError, IntegrityError, OfflineError
from aotpack.package import Package
from aotpack.package.front import HEADER_SIZE
from aotpack.store import is_offline, open_package
from tests.servers import FileServer
from tests.store.conftest import TINY

CPU, CUDA = 0, 1
LOAD = """
import sys
from aotpack.store import Store, open_package
store = Store(sys.argv[1])
with open_package(sys.argv[2], store) as package:
    print(store.unpack(package, package.manifest.variants[0]))
"""
LOAD_WITHOUT_NETWORK = f"""
import socket
def refuse(*a, **k):
    raise RuntimeError("the network was used")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
{LOAD}
assert "fsspec" not in sys.modules
"""


@pytest.fixture
def unpack(url, store, patience):
    """Opens a URL and unpacks variants of what is there; its bytes are counted in ``unpack.read``."""

    def unpack(*variants, source=url, offline=False, **more):
        unpack.read = []
        with open_package(
            source, store, offline=offline, patience=patience, on_bytes=unpack.read.append, **more
        ) as package:
            return [store.unpack(package, package.manifest.variants[index]) for index in variants]

    return unpack


def frames(*variants):
    """Bytes of the frames of variants of the tiny package, each once, with their dictionaries."""
    with Package.open(TINY) as package:
        blobs = package.manifest.blobs
        keys = {key for index in variants for key in package.manifest.variants[index].code}
        keys |= {blobs[key].dictionary for key in keys if blobs[key].dictionary}
        return sum(blobs[key].size for key in keys)


def front_size():
    with Package.open(TINY) as package:
        return package.size - sum(blob.size for blob in package.manifest.blobs.values())


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def another():
    """A package of the same size with another digest."""
    data = TINY.read_bytes()
    body = data[HEADER_SIZE : front_size()].replace(b'"torch":"2.14.1"', b'"torch":"2.14.2"')
    assert body != data[HEADER_SIZE : front_size()]
    return data[:16] + hashlib.sha256(body).digest() + body + data[front_size() :]


@pytest.mark.parametrize(
    ("said", "offline"),
    [("1", True), ("true", True), ("YES", True), ("", False), ("0", False), ("false", False), ("no", False)],
)
def test_the_environment_says_offline(monkeypatch, said, offline):
    monkeypatch.setenv("AOTPACK_OFFLINE", said)
    assert is_offline() is offline
    assert is_offline(False) is False
    assert is_offline(True) is True


def test_an_environment_that_says_neither_is_refused(monkeypatch):
    monkeypatch.setenv("AOTPACK_OFFLINE", "perhaps")
    with pytest.raises(InputError, match="AOTPACK_OFFLINE is neither yes nor no"):
        is_offline()


def test_the_front_and_the_frames_of_one_variant_are_read(unpack, server):
    unpack(CPU)
    assert sum(unpack.read) == server.sent == front_size() + frames(CPU)
    assert frames(CPU) < frames(CPU, CUDA)


def test_a_second_time_48_bytes_are_read(unpack, server):
    unpack(CPU)
    before = server.sent
    unpack(CPU)
    assert sum(unpack.read) == server.sent - before == 48


def test_another_variant_later_is_read_without_the_front(unpack):
    unpack(CPU)
    unpack(CUDA)
    assert sum(unpack.read) == 48 + frames(CUDA)


def test_offline_nothing_is_read(unpack, server):
    folders = unpack(CPU)
    before = len(server.requests)
    assert unpack(CPU, offline=True) == folders
    assert len(server.requests) == before


def test_offline_is_what_the_environment_says(unpack, server, monkeypatch):
    unpack(CPU)
    before = len(server.requests)
    monkeypatch.setenv("AOTPACK_OFFLINE", "1")
    unpack(CPU, offline=None)
    assert len(server.requests) == before


def test_offline_no_socket_is_opened_and_no_file_system_is_made(unpack, store, url):
    (folder,) = unpack(CPU)
    command = [sys.executable, "-c", LOAD_WITHOUT_NETWORK, store.root, url]
    environment = {**os.environ, "AOTPACK_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str(folder), done.stderr


def test_offline_a_url_that_was_never_read_is_named(unpack, store, url):
    with pytest.raises(OfflineError) as caught:
        unpack(CPU, source=f"{url}?sig=secret", offline=True)
    assert str(caught.value) == (
        f"aotpack is offline, and the store does not hold the index of {url}\n"
        f"  expected: what an earlier load or pull left in {store.root}\n"
        "  found: nothing of this package\n"
        f"  what to do: run 'aotpack pull {url}' while online"
    )


def test_offline_a_variant_that_was_never_read_is_named(unpack, url):
    unpack(CPU)
    with pytest.raises(OfflineError) as caught:
        unpack(CUDA, offline=True)
    assert str(caught.value) == (
        f"aotpack is offline, and the store does not hold what it needs of {url}\n"
        "  expected: the variant cuda-sm90 of 'full'\n"
        "  found: its index alone\n"
        f"  what to do: run 'aotpack pull {url}' while online"
    )


def test_a_presigned_url_is_remembered_without_its_signature(unpack, store, url):
    unpack(CPU, source=f"{url}?X-Amz-Signature=secret")
    unpack(CPU, source=f"{url}?X-Amz-Signature=another", offline=True)
    for name in files(store.root):
        assert b"secret" not in (store.root / name).read_bytes()


def test_a_package_that_was_replaced_is_used_and_remembered(unpack, server, store, url):
    unpack(CPU)
    server.files["/tiny.aotpack"] = another()
    unpack(CPU)
    assert sum(unpack.read) == front_size(), "its programs are the same and unpacked already"
    with open_package(url, store, offline=True) as package:
        assert package.manifest.provenance["torch"] == "2.14.2"


@pytest.mark.parametrize("where", [3, 100])
def test_a_remembered_front_that_is_damaged_is_replaced(unpack, store, where):
    unpack(CPU)
    (front,) = (store.root / "fronts").iterdir()
    whole = front.read_bytes()
    front.chmod(0o600)
    front.write_bytes(whole[:where] + b"X" + whole[where + 1 :])
    with pytest.raises(OfflineError):
        unpack(CPU, offline=True)
    unpack(CPU)
    assert sum(unpack.read) == front_size()
    assert front.read_bytes() == whole


def test_nothing_piles_up(unpack, store):
    unpack(CPU, CUDA)
    kinds = {name.partition("/")[0] for name in files(store.root)}
    assert kinds == {"fronts", "locks", "urls", "variants"}


def test_what_is_kept_is_private(unpack, store):
    old = os.umask(0)
    try:
        unpack(CPU)
    finally:
        os.umask(old)
    for path in store.root.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.suffix == ".lock", path


def test_frames_that_came_before_a_failure_are_not_read_again(unpack, server, store):
    server.faults = [*[""] * 5, *["503"] * 3]
    with pytest.raises(HostError):
        unpack(CPU)
    kept = list((store.root / "frames").iterdir())
    assert len(kept) == 2
    size = sum(path.stat().st_size for path in kept)
    unpack(CPU)
    assert sum(unpack.read) == 48 + frames(CPU) - size
    assert files(store.root / "frames") == []


def test_a_kept_frame_that_is_damaged_is_read_again(unpack, server, store):
    server.faults = [*[""] * 5, *["503"] * 3]
    with pytest.raises(HostError):
        unpack(CPU)
    for path in (store.root / "frames").iterdir():
        path.chmod(0o600)
        path.write_bytes(b"x" * path.stat().st_size)
    unpack(CPU)
    assert sum(unpack.read) == 48 + frames(CPU)


@pytest.mark.parametrize("faults", [0, 1, 2, 3])
@pytest.mark.parametrize("fault", ["wrong-range", "drop", "truncate"])
def test_a_passing_fault_anywhere_is_survived(unpack, server, store, faults, fault):
    server.faults = ["", *[""] * faults, fault]
    (folder,) = unpack(CPU)
    assert store.verify(folder.name) == []


@pytest.mark.parametrize("good", [1, 3])
def test_wrong_bytes_are_refused_and_never_unpacked(unpack, server, store, good):
    server.faults = [""] * good
    server.always = "wrong-range"
    with pytest.raises(IntegrityError):
        unpack(CPU)
    assert not (store.root / "variants").exists()
    assert not (store.root / "urls").exists()


def test_wrong_bytes_of_a_frame_are_asked_for_twice(unpack, server):
    data = bytearray(server.files["/tiny.aotpack"])
    data[front_size()] ^= 1
    server.files["/tiny.aotpack"] = bytes(data)
    with pytest.raises(IntegrityError, match="was altered: its frame of blob"):
        unpack(CPU)
    asked = [r.range for r in server.requests if r.range and r.range.startswith(f"bytes={front_size()}-")]
    assert len(asked) == 2


def test_a_file_that_was_cut_short_is_refused(unpack, server):
    unpack(CPU)
    server.files["/tiny.aotpack"] = server.files["/tiny.aotpack"][:-1]
    with pytest.raises(IntegrityError, match="is truncated"):
        unpack(CPU)


@pytest.mark.parametrize("data", [b"", b"abc", b"<html>" * 100])
def test_what_is_no_package_is_refused(unpack, server, data):
    server.files["/tiny.aotpack"] = data
    with pytest.raises(IntegrityError, match="is not an aotpack package"):
        unpack(CPU)


def test_replicas_are_tried_in_order(unpack, server, url, tiny):
    with FileServer(files={"/copy": tiny}) as second, warnings.catch_warnings():
        warnings.simplefilter("error")
        unpack(CPU, source=[second.url("/copy"), url])
        assert second.sent == front_size() + frames(CPU)
        assert server.sent == 48


def test_a_replica_that_cannot_be_reached_is_passed_over(unpack, url, store):
    with pytest.warns(UserWarning, match="from another replica: http://127.0.0.1:9/x cannot be"):
        unpack(CPU, source=["http://127.0.0.1:9/x", url])
    unpack(CPU, source=url, offline=True)
    with pytest.raises(OfflineError):
        unpack(CPU, source="http://127.0.0.1:9/x", offline=True)


def test_a_replica_that_goes_away_is_passed_over(unpack, server, url, tiny, store):
    with (
        FileServer(files={"/copy": tiny}, faults=[""] * 4, always="503") as second,
        pytest.warns(UserWarning, match="aotpack reads from another replica"),
    ):
        (folder,) = unpack(CPU, source=[second.url("/copy"), url])
    assert store.verify(folder.name) == []


def test_a_replica_with_wrong_bytes_is_passed_over(unpack, url, tiny, store):
    altered = tiny[:-100] + bytes(100)
    for cut in range(front_size(), len(tiny)):
        altered = altered[:cut] + bytes([altered[cut] ^ 1]) + altered[cut + 1 :]
    with FileServer(files={"/copy": altered}) as second:
        (folder,) = unpack(CPU, source=[second.url("/copy"), url])
    assert store.verify(folder.name) == []


def test_replicas_that_differ_are_refused(unpack, url, store):
    with FileServer(files={"/copy": another()}) as second:
        with pytest.raises(IntegrityError) as caught:
            unpack(CPU, source=[url, second.url("/copy")])
        with Package.open(TINY) as package:
            assert f"\n    {url}: digest {package.digest}, {package.size} bytes" in caught.value.found
        assert f"\n    {second.url('/copy')}: digest " in caught.value.found
    assert caught.value.problem == "the replicas are not copies of one package"
    assert not store.root.exists()


def test_no_replica_left_names_all(unpack):
    with pytest.raises(HostError) as caught:
        unpack(CPU, source=["http://127.0.0.1:9/x", "/nothing.aotpack"])
    assert caught.value.problem == "the package cannot be read from any of its places"
    assert "http://127.0.0.1:9/x" in caught.value.found
    assert "there is no package at /nothing.aotpack" in caught.value.found


def test_a_path_among_replicas_is_read_offline_too(unpack, url, server):
    unpack(CPU, source=[url, TINY], offline=True)
    assert server.requests == []


def test_an_empty_list_is_refused(unpack):
    with pytest.raises(InputError, match="no package is named"):
        unpack(CPU, source=[])


def test_processes_at_once_read_each_frame_once(server, store, url):
    command = [sys.executable, "-c", LOAD, store.root, url]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    folders = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 4
    assert len(folders) == 1
    ranges = [request.range for request in server.requests if request.range]
    of_frames = [asked for asked in ranges if int(asked[6:].partition("-")[0]) >= front_size()]
    assert len(of_frames) == len(set(of_frames))
    assert files(store.root / "frames") == files(store.root / "staging") == []


@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_store_that_is_read_only_is_used(unpack, store, url, offline):
    (folder,) = unpack(CPU)
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", store.root, sys.executable, "-c", LOAD, store.root]
    environment = {**os.environ, "AOTPACK_OFFLINE": offline}
    done = subprocess.run([*command, url], capture_output=True, text=True, env=environment)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.stdout.strip() == str(folder), done.stderr
