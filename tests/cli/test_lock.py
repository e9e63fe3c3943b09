"""lock: digests written down, looked up again, and compared."""

import json
import shutil
from pathlib import Path

import pytest

from aotpack.lockfile import Lockfile
from aotpack.package import Package
from tests.process import aotpack, only_object

TINY = Path(__file__).parent.parent / "package" / "assets" / "tiny.aotpack"


@pytest.fixture
def here(tmp_path, monkeypatch):
    shutil.copy(TINY, tmp_path / "drafter.aotpack")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_lock_is_written_beside_what_it_had(here):
    found = only_object(aotpack("lock", "drafter.aotpack", "--json"))
    assert found["schema"] == "aotpack.lock/1"
    aotpack("lock", "other=drafter.aotpack", f"other={TINY}")
    lock = Lockfile.read("aotpack.lock")
    with Package.open(TINY) as package:
        assert {locked.digest for locked in lock.packages.values()} == {package.digest}
    assert lock.packages["drafter"].sources == ("drafter.aotpack",)
    assert lock.packages["other"].sources == ("drafter.aotpack", str(TINY))
    assert lock.packages["drafter"].targets == ("cpu-x86_64-v3", "cuda-sm90")


def test_a_changed_package_is_noticed_and_locked_again(here, dflash_package):
    aotpack("lock", "drafter.aotpack")
    before = Path("aotpack.lock").read_bytes()
    assert aotpack("lock", "--check").returncode == 0
    shutil.copy(dflash_package, "drafter.aotpack")
    done = aotpack("lock", "--check")
    assert (done.returncode, Path("aotpack.lock").read_bytes()) == (4, before)
    assert "drafter is not what aotpack.lock locks" in done.stderr
    assert aotpack("lock").returncode == 0
    assert aotpack("lock", "--check").returncode == 0


def test_replicas_that_differ_are_not_locked(here, dflash_package):
    done = aotpack("lock", "drafter=drafter.aotpack", f"drafter={dflash_package}")
    assert done.returncode == 4
    assert not Path("aotpack.lock").exists()


@pytest.mark.parametrize(
    ("arguments", "code"), [([], 2), (["none.aotpack"], 2), (["a b=drafter.aotpack"], 2)]
)
def test_wrong_input_writes_nothing(here, arguments, code):
    done = aotpack("lock", *arguments, "--json")
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["schema"] == "aotpack.error/1"
    assert not Path("aotpack.lock").exists()
