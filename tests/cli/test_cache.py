"""cache: what is unpacked, whether it is whole, and what goes."""

import os
import time
from pathlib import Path

import pytest

from aotpack.package import Package
from aotpack.store import Store
from tests.process import aotpack, only_object

TINY = Path(__file__).parent.parent / "package" / "assets" / "tiny.aotpack"


@pytest.fixture
def root(tmp_path):
    """A store in which two variants are unpacked, the second an hour after the first."""
    store = Store(tmp_path / "store")
    with Package.open(TINY) as package:
        for age, variant in zip((7200, 3600), package.manifest.variants, strict=True):
            folder = store.unpack(package, variant)
            os.utime(folder, (time.time() - age,) * 2)
    return store.root


def cache(root, *arguments):
    return aotpack("cache", *arguments, AOTPACK_CACHE=str(root))


def test_ls_lists_the_last_used_first(root):
    found = only_object(cache(root, "ls", "--json"))
    assert found["schema"] == "aotpack.cache.ls/1"
    used = [variant["used"] for variant in found["variants"]]
    assert used == sorted(used, reverse=True)
    assert len(used) == 2
    assert found["bytes"] == sum(variant["bytes"] for variant in found["variants"])


def test_ls_of_an_empty_store_makes_nothing(tmp_path):
    done = cache(tmp_path / "none", "ls")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'none'}\nnothing is unpacked\n")
    assert not (tmp_path / "none").exists()


def test_verify_names_what_is_damaged(root):
    assert only_object(cache(root, "verify", "--json"))["damaged"] == {}
    (entry, _) = Store(root).entries()
    library = next((root / "variants" / entry.digest).glob("forward*/library.so"))
    library.chmod(0o600)
    library.write_bytes(library.read_bytes() + b"x")
    done = cache(root, "verify", "--json")
    assert done.returncode == 4
    name = str(library.relative_to(root / "variants" / entry.digest))
    assert only_object(done)["damaged"] == {entry.digest: [name]}
    assert "1 of 2 unpacked variants are damaged" in done.stderr


@pytest.mark.parametrize(
    ("keep", "left"), [("2", 2), ("1", 1), ("0", 0), ("3h", 2), ("90m", 1), ("30m", 0), ("30d", 2)]
)
def test_gc_keeps_the_last_used(root, keep, left):
    newest = max(Store(root).entries(), key=lambda entry: entry.used)
    found = only_object(cache(root, "gc", "--keep", keep, "--json"))
    assert (found["kept"], len(found["removed"])) == (left, 2 - left)
    entries = Store(root).entries()
    assert len(entries) == left
    assert not left or newest in entries
    assert list((root / "staging").iterdir()) == []


def test_gc_forgets_what_is_remembered_beside_the_variants(root):
    for kind, age in (("fronts", 7200), ("urls", 600)):
        (root / kind).mkdir()
        (root / kind / "x").write_bytes(b"12345")
        os.utime(root / kind / "x", (time.time() - age,) * 2)
    found = only_object(cache(root, "gc", "--keep", "1h", "--json"))
    assert not (root / "fronts" / "x").exists()
    assert (root / "urls" / "x").exists()
    assert found["bytes"] > 5


def test_gc_refuses_an_age_that_it_does_not_understand(root):
    done = cache(root, "gc", "--keep", "a while")
    assert done.returncode == 2
    assert "a count or an age" in done.stderr
