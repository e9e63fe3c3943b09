import hashlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from aotpack.errors import HostError, IntegrityError
from aotpack.package import Package
from aotpack.store import Store, kernel_folder, library_path

TINY = Path(__file__).parent.parent / "package" / "assets" / "tiny.aotpack"
REMEDY = "set AOTPACK_CACHE to a folder of this user on a local, writable, executable file system"
UNPACK = """
import os, sys
from aotpack.package import Package
from aotpack.store import Store
with Package.open(sys.argv[1]) as package:
    while len(sys.argv) > 2 and not os.path.exists(sys.argv[2]):
        pass
    print(Store().unpack(package, package.manifest.variants[1]))
"""
STALL = """
import pathlib, sys, time
from aotpack.package import FileSource, Package
from aotpack.store import Store

class Slow(FileSource):
    reads = 0
    def read_range(self, offset, size):
        self.reads += 1
        if self.reads == 6:
            pathlib.Path(sys.argv[2]).touch()
            time.sleep(600)
        return super().read_range(offset, size)

package = Package(Slow(sys.argv[1]))
Store().unpack(package, package.manifest.variants[1])
"""
MOUNTED = 'mount -t tmpfs -o "$1" tmpfs "$2" && shift 2 && exec "$@"'


@pytest.fixture
def package():
    with Package.open(TINY) as package:
        yield package


@pytest.fixture
def variant(package):
    return package.manifest.variants[1]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTPACK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def start(program, *arguments):
    command = [sys.executable, "-c", program, str(TINY), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out.strip()


def wait_for(path):
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def unpack_mounted(options, folder):
    """Unpack in a process that sees a file system of its own, mounted with these options, at the cache."""
    folder.mkdir()
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        MOUNTED,
        "sh",
        options,
        folder,
        sys.executable,
        "-c",
        UNPACK,
        TINY,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    return done


@pytest.mark.parametrize(
    ("environment", "root"),
    [
        ({"AOTPACK_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/a"),
        ({"AOTPACK_CACHE": "~/a", "HOME": "/c"}, "/c/a"),
        ({"AOTPACK_CACHE": "", "XDG_CACHE_HOME": "/b", "HOME": "/c"}, "/b/aotpack"),
        ({"XDG_CACHE_HOME": "b", "HOME": "/c"}, "/c/.cache/aotpack"),
        ({"HOME": "/c"}, "/c/.cache/aotpack"),
    ],
)
def test_root_follows_the_environment(monkeypatch, environment, root):
    for name in ("AOTPACK_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Store().root == Path(root)


def test_nothing_is_made_before_it_is_needed(root):
    Store()
    assert not root.exists()
    assert Store().entries() == []


def test_unpacked_folder_has_every_file_of_the_variant_and_no_other(root, package, variant):
    folder = Store().unpack(package, variant)
    assert folder.parent == root / "variants"
    for program in variant.programs:
        assert hashlib.sha256(library_path(folder, program).read_bytes()).hexdigest() == program.library
        for name, key in program.kernels:
            data = (kernel_folder(folder, program) / name).read_bytes()
            assert hashlib.sha256(data).hexdigest() == key
    assert len(files(folder)) == 3 + 3 + 1
    assert list((root / "staging").iterdir()) == []


def test_everything_is_private_to_the_user(root, package, variant):
    old = os.umask(0)
    try:
        folder = Store().unpack(package, variant)
    finally:
        os.umask(old)
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*") if path.is_file()} == {0o400}


def test_folder_that_others_may_write_is_closed_to_them(root, package, variant):
    root.mkdir()
    root.chmod(0o777)
    Store().unpack(package, variant)
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_folder_is_named_by_its_content(root, package, variant):
    folder = Store().unpack(package, variant)
    index = (folder / "files.json").read_bytes()
    assert folder.name == hashlib.sha256(index).hexdigest()
    assert sorted([*json.loads(index), "files.json"]) == files(folder)


def test_second_load_writes_nothing_and_reads_no_blob(root, package, variant, monkeypatch):
    folder = Store().unpack(package, variant)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path != folder}
    monkeypatch.setattr(Package, "read_blob", None)
    assert Store().unpack(package, variant) == folder
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*") if path != folder} == before


def test_variants_do_not_share_a_folder(root, package):
    folders = {Store().unpack(package, variant) for variant in package.manifest.variants}
    assert len(folders) == 2
    assert [entry.digest for entry in Store().entries()] == sorted(folder.name for folder in folders)


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


def _link(path):
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "flipped": _flip,
    "emptied": lambda path: (path.chmod(0o600), path.write_bytes(b"")),
    "deleted": lambda path: path.unlink(),
    "longer": lambda path: (path.chmod(0o600), path.write_bytes(path.read_bytes() + b"x")),
    "link": _link,
    "pipe": _pipe,
    "folder": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_repaired_from_the_package(root, package, variant, damage):
    folder = Store().unpack(package, variant)
    path = library_path(folder, variant.programs[1])
    whole = {name: (folder / name).read_bytes() for name in files(folder)}
    other = library_path(folder, variant.programs[0]).stat().st_ino
    DAMAGE[damage](path)
    assert Store().unpack(package, variant) == folder
    assert {name: (folder / name).read_bytes() for name in whole} == whole
    assert path.is_file()
    assert not path.is_symlink()
    assert library_path(folder, variant.programs[0]).stat().st_ino == other
    assert list((root / "staging").iterdir()) == []


def test_repair_from_an_altered_package_fails_and_hands_nothing_out(root, tmp_path, package, variant):
    folder = Store().unpack(package, variant)
    library_path(folder, variant.programs[0]).unlink()
    data = bytearray(TINY.read_bytes())
    data[-1440:] = bytes(1440)
    (tmp_path / "altered").write_bytes(data)
    with Package.open(tmp_path / "altered") as altered, pytest.raises(IntegrityError, match="was altered"):
        Store().unpack(altered, variant)
    assert list((root / "staging").iterdir()) == []


def test_repair_that_cannot_be_written_is_an_integrity_error(root, package, variant):
    folder = Store().unpack(package, variant)
    path = library_path(folder, variant.programs[0])
    path.unlink()
    path.mkdir()
    with pytest.raises(IntegrityError) as caught:
        Store().unpack(package, variant)
    assert str(caught.value) == (
        "an unpacked variant is damaged and cannot be repaired: Is a directory\n"
        f"  expected: the package's files in {folder}\n"
        "  found: other bytes, or nothing, in block_mask.general/library.so\n"
        f"  what to do: delete that folder, or {REMEDY}"
    )


def test_six_processes_at_once_leave_one_copy(root, tmp_path):
    processes = [start(UNPACK, tmp_path / "go") for _ in range(6)]
    time.sleep(1)
    (tmp_path / "go").touch()
    folders = {finish(process) for process in processes}
    assert len(folders) == 1
    assert [str(path) for path in (root / "variants").iterdir()] == list(folders)
    assert list((root / "staging").iterdir()) == []


def test_threads_at_once_leave_one_copy(root, package):
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(Store().unpack, package, v) for v in package.manifest.variants * 8]
        assert len({job.result() for job in jobs}) == 2
    assert len(Store().entries()) == 2
    assert list((root / "staging").iterdir()) == []


def test_killed_process_leaves_no_debris_behind_the_next_ones(root, tmp_path):
    killed = start(STALL, tmp_path / "half-way")
    wait_for(tmp_path / "half-way")
    waiting = [start(UNPACK) for _ in range(5)]
    time.sleep(0.3)
    assert not (root / "variants").exists()
    assert len(files(root / "staging")) > 1
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    folders = {finish(process) for process in [*waiting, start(UNPACK)]}
    assert [str(path) for path in (root / "variants").iterdir()] == list(folders)
    assert list((root / "staging").iterdir()) == []
    assert Store().verify(Path(folders.pop()).name) == []


def test_debris_of_a_killed_process_goes_when_another_variant_is_unpacked(root, tmp_path, package):
    killed = start(STALL, tmp_path / "half-way")
    wait_for(tmp_path / "half-way")
    Store().unpack(package, package.manifest.variants[0])
    assert len(list((root / "staging").iterdir())) == 1, "a living process keeps its staging folder"
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    shutil.rmtree(root / "variants")
    Store().unpack(package, package.manifest.variants[0])
    assert list((root / "staging").iterdir()) == []


def test_lock_that_is_never_released_is_named(root, tmp_path, package, variant, monkeypatch):
    monkeypatch.setattr("aotpack.store.unpacked._LOCK_SECONDS", 0.2)
    holder = start(STALL, tmp_path / "half-way")
    wait_for(tmp_path / "half-way")
    try:
        with pytest.raises(HostError) as caught:
            Store().unpack(package, variant)
    finally:
        holder.kill()
        holder.communicate()
    lock = next((root / "locks").iterdir())
    assert str(caught.value) == (
        f"another process has held {lock} for 0 seconds\n"
        "  what to do: end that process, or set AOTPACK_CACHE to another folder"
    )


def test_cache_that_is_a_file_names_the_remedy(root, package, variant):
    root.write_text("")
    with pytest.raises(HostError) as caught:
        Store().unpack(package, variant)
    assert str(caught.value) == (
        f"the cache folder {root} cannot be used: File exists\n  what to do: {REMEDY}"
    )


def test_cache_of_another_user_is_refused(root, package, variant, monkeypatch):
    root.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if root.stat().st_uid == 0:
        os.chown(root, 54321, -1)
    with pytest.raises(HostError) as caught:
        Store().unpack(package, variant)
    assert str(caught.value) == f"the cache folder {root} belongs to another user\n  what to do: {REMEDY}"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("noexec", "is on a file system that is mounted noexec"),
        ("ro", "cannot be used: Read-only file system"),
        ("size=20k", "cannot be used: No space left on device"),
        ("nr_inodes=8", "cannot be used: No space left on device"),
    ],
)
def test_unusable_file_system_names_the_remedy(root, options, problem):
    done = unpack_mounted(options, root)
    assert done.returncode == 1
    message = f"aotpack.errors.HostError: the cache folder {root} {problem}\n  what to do: {REMEDY}\n"
    assert done.stderr.endswith(message)


def test_mounted_file_system_that_is_usable_is_used(root):
    assert unpack_mounted("size=1m", root).returncode == 0


def test_whole_cache_that_is_read_only_is_used(root, tmp_path, package, variant):
    folder = Store().unpack(package, variant)
    script = 'mount --bind "$1" "$1" && mount -o remount,bind,ro "$1" && shift && exec "$@"'
    command = ["unshare", "-rm", "sh", "-c", script, "sh", root, sys.executable, "-c", UNPACK, TINY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    assert done.stdout.strip() == str(folder), done.stderr


def test_system_temp_folder_is_not_used(root, tmp_path):
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    subprocess.run([sys.executable, "-c", UNPACK, TINY], env=environment, check=True)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_entries_verify_and_remove(root, package, variant):
    store = Store()
    folder = store.unpack(package, variant)
    (entry,) = store.entries()
    assert entry.digest == folder.name
    assert entry.size == sum((folder / name).stat().st_size for name in files(folder))
    assert time.time() - entry.used < 60
    assert store.verify(entry.digest) == []
    library = library_path(folder, variant.programs[0])
    _flip(library)
    assert store.verify(entry.digest) == [str(library.relative_to(folder))]
    _flip(folder / "files.json")
    assert store.verify(entry.digest) == ["files.json"]
    store.remove(entry.digest)
    assert store.entries() == []
    assert store.verify(entry.digest) == ["files.json"]
    store.remove(entry.digest)
    assert list((root / "staging").iterdir()) == []


@pytest.mark.parametrize("digest", ["", "..", "../x", "a", "A" * 64])
def test_digest_that_is_none_names_no_folder(root, digest):
    for call in (Store().verify, Store().remove):
        with pytest.raises(
            ValueError, match=re.escape(f"{digest!r} is not the digest of an unpacked variant")
        ):
            call(digest)
