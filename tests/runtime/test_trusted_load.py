"""load with a policy or a lock: what is not accepted is refused before a library is opened."""

from __future__ import annotations

import shutil

import pytest

import aotpack
from aotpack.errors import InputError, IntegrityError, TrustError
from aotpack.lockfile import Locked, Lockfile
from aotpack.package import Package
from aotpack.runtime import programs
from aotpack.trust import (
    any_of,
    generate_key_pair,
    pinned,
    read_private_key,
    sign,
    signature_path,
    trusted_keys,
    unsafe_accept_anything,
)
from tests.process import rewritten


@pytest.fixture
def signed(dflash_package, tmp_path):
    """A package with a signature, and the key's two files."""
    path = tmp_path / "signed.aotpack"
    shutil.copy(dflash_package, path)
    generate_key_pair(tmp_path / "release.key")
    with Package.open(path) as package:
        sign(path, package.digest, read_private_key(tmp_path / "release.key"))
    return path


@pytest.fixture
def key(signed):
    return signed.parent / "release.key.pub"


@pytest.fixture
def no_library(monkeypatch):
    """No library may be opened."""

    def refuse(*arguments, **options):
        pytest.fail("a library was opened")

    monkeypatch.setattr(programs, "Library", refuse)


def test_a_package_signed_by_a_trusted_key_is_loaded(signed, key):
    assert aotpack.load(signed, trust=trusted_keys(key)).digest
    assert aotpack.load(signed, trust=pinned(aotpack.load(signed).digest)).digest


@pytest.mark.parametrize("kind", ["unsigned", "another key", "another package", "repacked", "another digest"])
def test_anything_else_is_refused_before_a_library_is_opened(
    kind, signed, key, float32_package, no_library, tmp_path
):
    policy = trusted_keys(key)
    if kind == "unsigned":
        signature_path(signed).unlink()
    elif kind == "another key":
        generate_key_pair(tmp_path / "other.key")
        policy = trusted_keys(tmp_path / "other.key.pub")
    elif kind == "another package":
        shutil.copy(float32_package, signed)
    elif kind == "repacked":
        rewritten(signed, signed, tolerance=0.5)
    else:
        policy = pinned("0" * 64)
    with pytest.raises(TrustError) as caught:
        aotpack.load(signed, trust=policy)
    assert caught.value.exit_code == 4


def test_the_environment_sets_a_policy_that_the_call_may_replace(signed, key, monkeypatch, recwarn):
    monkeypatch.setenv("AOTPACK_TRUSTED_KEYS", str(key))
    assert aotpack.load(signed).digest
    signature_path(signed).unlink()
    with pytest.raises(TrustError):
        aotpack.load(signed)
    assert aotpack.load(signed, trust=any_of(trusted_keys(key), pinned(digest(signed)))).digest
    for _ in range(2):
        assert aotpack.load(signed, trust=unsafe_accept_anything()).digest
    assert len([w for w in recwarn if "anything" in str(w.message) or "trust" in str(w.message)]) <= 1


def digest(path):
    with Package.open(path) as package:
        return package.digest


@pytest.fixture
def lock(dflash_package, tmp_path, monkeypatch):
    monkeypatch.delenv("AOTPACK_LOCK", raising=False)
    locked = Locked(digest=digest(dflash_package), targets=("x",), sources=(str(dflash_package),))
    made = Lockfile(path=tmp_path / "aotpack.lock", packages={"drafter": locked})
    made.write()
    return made


def test_a_locked_name_is_a_source(lock, dflash_package, tmp_path, monkeypatch):
    assert aotpack.load("drafter", lock=lock.path).path == str(dflash_package)
    monkeypatch.chdir(tmp_path)
    assert aotpack.load("drafter").digest == digest(dflash_package)
    assert aotpack.load(dflash_package).digest == digest(dflash_package)


def test_nothing_else_is_taken_where_there_is_a_lock(lock, float32_package, monkeypatch, no_library):
    with pytest.raises(IntegrityError, match=r"is not what .* locks"):
        aotpack.load(float32_package, lock=lock.path)
    monkeypatch.setenv("AOTPACK_LOCK", str(lock.path))
    with pytest.raises(IntegrityError, match=r"is not what .* locks"):
        aotpack.load(float32_package)
    with pytest.raises(InputError, match="there is no package"):
        aotpack.load("another-name")


def test_a_replaced_file_under_a_locked_name_is_refused(
    float32_package, dflash_package, tmp_path, no_library
):
    path = tmp_path / "drafter.aotpack"
    shutil.copy(float32_package, path)
    locked = Locked(digest=digest(dflash_package), targets=("x",), sources=("drafter.aotpack",))
    Lockfile(path=tmp_path / "aotpack.lock", packages={"drafter": locked}).write()
    with pytest.raises(IntegrityError):
        aotpack.load("drafter", lock=tmp_path / "aotpack.lock")
