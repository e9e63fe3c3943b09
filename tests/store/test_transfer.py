"""Whole packages to and from URLs."""

import os
import stat
import time

import fsspec
import pytest

from aotpack.errors import HostError, InputError, IntegrityError, OutputError
from aotpack.package import Package
from aotpack.store import open_package
from aotpack.store.downloads import download
from aotpack.store.uploads import upload
from tests.servers import FileServer, s3_server
from tests.store.conftest import TINY
from tests.store.test_opening import another, files, frames, front_size

SIGNATURE = b"whose word it is"


@pytest.fixture(scope="module")
def s3():
    with s3_server("bucket") as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def package(tmp_path, tiny):
    """A package file with a signature file beside it."""
    (tmp_path / "here").mkdir()
    path = tmp_path / "here" / "x.aotpack"
    path.write_bytes(tiny)
    path.with_name("x.aotpack.sig").write_bytes(SIGNATURE)
    return path


@pytest.fixture(params=["s3", "http", "memory", "file"])
def target(request, tmp_path):
    """A URL to write to, in places of every kind."""
    name = f"{tmp_path.name}/x.aotpack"
    if request.param == "s3":
        request.getfixturevalue("s3")
        yield f"s3://bucket/{name}"
    elif request.param == "http":
        with FileServer() as server:
            yield server.url("/x.aotpack")
    else:
        yield f"memory://{name}" if request.param == "memory" else f"file://{tmp_path}/deep/er/x.aotpack"


def read(url):
    with fsspec.open(url, skip_instance_cache=True) as file:
        return file.read()


def test_what_was_uploaded_is_loaded_and_downloaded(target, package, tmp_path, store, patience, tiny):
    counted, came = [], []
    done = upload(package, target, patience=patience, on_bytes=counted.append)
    assert (done.written, done.signed, done.size) == (True, True, len(tiny))
    assert read(target) == tiny
    assert read(f"{target}.sig") == SIGNATURE
    with open_package(target, store, patience=patience, on_bytes=came.append) as opened:
        store.unpack(opened, opened.manifest.variants[0])
    assert sum(came) == front_size() + frames(0)
    got = download(target, tmp_path / "got.aotpack", patience=patience)
    assert (got.digest, got.size, got.signed) == (done.digest, len(tiny), True)
    assert got.targets == ("cpu-x86_64-v3", "cuda-sm90")
    assert (tmp_path / "got.aotpack").read_bytes() == tiny
    assert (tmp_path / "got.aotpack.sig").read_bytes() == SIGNATURE
    assert files(tmp_path / "deep") in ([], ["er/x.aotpack", "er/x.aotpack.sig"])


def test_the_same_package_is_not_uploaded_again(target, package, patience):
    upload(package, target, patience=patience)
    assert upload(package, target, patience=patience).written is False


def test_another_package_is_replaced_only_by_force(target, package, patience, tiny):
    upload(package, target, patience=patience)
    package.write_bytes(another())
    with pytest.raises(OutputError, match="something else is at"):
        upload(package, target, patience=patience)
    assert read(target) == tiny
    assert upload(package, target, force=True, patience=patience).written
    assert read(target) == another()


def test_what_is_no_package_is_replaced_only_by_force(target, package, patience, tiny):
    upload(package, target, patience=patience)
    fsspec.url_to_fs(target)[0].pipe_file(target, b"something of somebody")
    with pytest.raises(OutputError) as caught:
        upload(package, target, patience=patience)
    assert caught.value.found == "a file that is not a package"
    upload(package, target, force=True, patience=patience)
    assert read(target) == tiny


def test_an_altered_package_is_not_uploaded(target, package, patience):
    data = bytearray(package.read_bytes())
    data[-9] ^= 1
    package.write_bytes(data)
    with pytest.raises(IntegrityError, match="was altered"):
        upload(package, target, patience=patience)
    with pytest.raises(InputError, match="there is no package at"):
        download(target, package.with_name("got"), patience=patience)


def test_an_upload_that_was_cut_short_is_written_again(url, server, package, patience, tiny):
    server.files["/tiny.aotpack"] = tiny[:-5]
    assert upload(package, url, patience=patience).written
    assert server.files["/tiny.aotpack"] == tiny


def test_a_place_that_takes_no_upload_is_named_without_secrets(package, patience):
    with FileServer() as server, pytest.raises(HostError) as caught:
        upload(package, f"http://u:secret@127.0.0.1:{server.port}/refused?sig=secret", patience=patience)
    assert caught.value.problem.endswith("/refused cannot be written")
    assert caught.value.found == "HTTP status 405 Method Not Allowed"
    assert "secret" not in str(caught.value)


def test_a_folder_in_the_way_is_named_and_left_alone(package, tmp_path, patience):
    (tmp_path / "folder").mkdir()
    with pytest.raises(HostError) as caught:
        upload(package, f"file://{tmp_path}/folder", patience=patience)
    assert caught.value.found == "it is a folder"
    assert files(tmp_path / "folder") == []


def test_a_bucket_that_is_not_there_is_named(s3, package, patience):
    with pytest.raises(HostError, match="s3://nothing/x cannot be written"):
        upload(package, "s3://nothing/x", patience=patience)
    with pytest.raises(InputError, match="there is no package at s3://nothing/x"):
        download("s3://nothing/x", package, patience=patience)


def test_missing_credentials_are_named(s3, package, patience, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(HostError) as caught:
        download("s3://bucket/x", package, patience=patience)
    assert caught.value.problem == "s3://bucket/x may not be read with the credentials of this process"
    assert caught.value.found == "Unable to locate credentials"


def test_an_interrupted_download_goes_on(url, server, tmp_path, patience, tiny):
    path, came = tmp_path / "x.aotpack", []
    server.faults = [""] * 6 + ["503"] * 3
    with pytest.raises(HostError):
        download(url, path, patience=patience)
    part = (tmp_path / "x.aotpack.part").read_bytes()
    assert front_size() < len(part) < len(tiny)
    assert not path.exists()
    download(url, path, patience=patience, on_bytes=came.append)
    assert sum(came) == 48 + len(tiny) - len(part)
    assert path.read_bytes() == tiny
    assert files(tmp_path) == ["x.aotpack"]


@pytest.mark.parametrize("damage", ["frame", "front", "half", "longer", "another"])
def test_a_part_that_is_damaged_is_mended(url, tmp_path, patience, tiny, damage):
    size = front_size()
    parts = {
        "frame": tiny[: size + 20] + b"XX" + tiny[size + 22 :],
        "front": b"X" + tiny[1:],
        "half": tiny[: size // 2],
        "longer": tiny + b"more",
        "another": another(),
    }
    (tmp_path / "x.aotpack.part").write_bytes(parts[damage])
    download(url, tmp_path / "x.aotpack", patience=patience)
    assert (tmp_path / "x.aotpack").read_bytes() == tiny
    assert files(tmp_path) == ["x.aotpack"]


def test_a_file_that_is_whole_is_not_fetched_again(url, server, tmp_path, patience):
    download(url, tmp_path / "x.aotpack", patience=patience)
    before = server.sent
    download(url, tmp_path / "x.aotpack", patience=patience)
    assert server.sent - before == 48


def test_a_file_that_is_damaged_is_replaced(url, tmp_path, patience, tiny):
    (tmp_path / "x.aotpack").write_bytes(tiny[:-1] + b"X")
    download(url, tmp_path / "x.aotpack", patience=patience)
    assert (tmp_path / "x.aotpack").read_bytes() == tiny


def test_wrong_bytes_are_never_named_as_a_package(url, server, tmp_path, patience, tiny):
    server.files["/tiny.aotpack"] = tiny[:-1] + bytes([tiny[-1] ^ 1])
    with pytest.raises(IntegrityError, match="its frame at offset"):
        download(url, tmp_path / "x.aotpack", patience=patience)
    assert files(tmp_path) == ["x.aotpack.part"]


def test_two_downloads_to_one_file_do_not_mix(url, server, tmp_path, patience):
    import fcntl

    part = tmp_path / "x.aotpack.part"
    with part.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another process is downloading to"):
            download(url, tmp_path / "x.aotpack", patience=patience)


def test_a_download_follows_the_umask(url, tmp_path, patience):
    old = os.umask(0o022)
    try:
        download(url, tmp_path / "x.aotpack", patience=patience)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "x.aotpack").stat().st_mode) == 0o644


def test_a_folder_that_is_missing_is_an_output_error(url, tmp_path, patience):
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        download(url, tmp_path / "missing" / "x.aotpack", patience=patience)


def test_a_part_of_long_ago_is_forgotten(url, store, patience):
    frames_folder = store.root / "frames"
    frames_folder.mkdir(parents=True)
    (frames_folder / "old").write_bytes(b"")
    (frames_folder / ".half.0a0a.tmp").write_bytes(b"")
    (frames_folder / "new").write_bytes(b"")
    week = time.time() - 8 * 86400
    os.utime(frames_folder / "old", (week, week))
    with open_package(url, store, patience=patience) as opened, Package.open(TINY) as local:
        assert opened.digest == local.digest
    assert files(frames_folder) == ["new"]
