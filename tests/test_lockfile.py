"""Locks: read back as written, every defect named, another package refused."""

import json

import pytest

from aotpack.errors import InputError, IntegrityError, OutputError
from aotpack.lockfile import Locked, Lockfile, find_lockfile

ONE, OTHER = "1" * 64, "2" * 64
DRAFTER = Locked(digest=ONE, targets=("cpu-x86_64-v3",), sources=("packages/d.aotpack", "s3://b/d.aotpack"))


@pytest.fixture
def lock(tmp_path):
    made = Lockfile(path=tmp_path / "aotpack.lock", packages={"drafter": DRAFTER})
    made.write()
    return made


def test_what_is_written_is_read_back(lock):
    assert Lockfile.read(lock.path) == lock
    assert [path.name for path in lock.path.parent.iterdir()] == ["aotpack.lock"]


def test_relative_sources_are_relative_to_the_lock(lock):
    assert lock.sources("drafter") == [f"{lock.path.parent}/packages/d.aotpack", "s3://b/d.aotpack"]
    assert lock.sources("another") is None


def test_another_package_is_refused(lock):
    lock.check("x.aotpack", ONE)
    lock.check("x.aotpack", ONE, "drafter")
    with pytest.raises(IntegrityError) as caught:
        lock.check("x.aotpack", OTHER)
    assert str(caught.value) == (
        f"x.aotpack is not what {lock.path} locks\n"
        f"  expected: drafter {ONE}\n"
        f"  found: {OTHER}\n"
        "  what to do: if the new package is right, run 'aotpack lock' again and commit the lock"
    )


DEFECTS = {
    "no JSON": (b"{", "is no JSON"),
    "no object": (b"[]", "the whole"),
    "another schema": (json.dumps({"schema": "aotpack.lock/2", "packages": {}}).encode(), "schema"),
    "no packages": (b'{"schema":"aotpack.lock/1"}', "packages"),
    "a digest in capitals": ({"digest": "A" * 64}, "digest"),
    "no sources": ({"sources": []}, "sources"),
    "a source of two lines": ({"sources": ["a\nb"]}, "sources"),
    "a field more": ({"comment": "x"}, "comment"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_every_defect_is_named(tmp_path, defect):
    given, message = DEFECTS[defect]
    if isinstance(given, dict):
        entry = {"digest": ONE, "targets": [], "sources": ["x"], **given}
        given = json.dumps({"schema": "aotpack.lock/1", "packages": {"drafter": entry}}).encode()
    path = tmp_path / "aotpack.lock"
    path.write_bytes(given)
    with pytest.raises(IntegrityError, match=message):
        Lockfile.read(path)


def test_a_lock_that_cannot_be_read_or_written_is_an_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read: No such file"):
        Lockfile.read(tmp_path / "none")
    with pytest.raises(OutputError, match="cannot be written"):
        Lockfile(path=tmp_path / "none" / "aotpack.lock", packages={}).write()


def test_the_lock_in_force_is_given_named_or_here(lock, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.delenv("AOTPACK_LOCK", raising=False)
    assert find_lockfile() is None
    assert find_lockfile(lock.path) == lock
    monkeypatch.setenv("AOTPACK_LOCK", str(lock.path))
    assert find_lockfile() == lock
    monkeypatch.delenv("AOTPACK_LOCK")
    monkeypatch.chdir(lock.path.parent)
    assert find_lockfile() == lock
    monkeypatch.setenv("AOTPACK_LOCK", str(tmp_path / "gone"))
    with pytest.raises(InputError):
        find_lockfile()
