"""Real keys and a package to sign: a copy of the tiny one that other tests read."""

import shutil
from pathlib import Path

import pytest

from aotpack.package import Package
from aotpack.trust import generate_key_pair, read_private_key

TINY = Path(__file__).parent.parent / "package" / "assets" / "tiny.aotpack"


@pytest.fixture
def package(tmp_path):
    path = tmp_path / "tiny.aotpack"
    shutil.copyfile(TINY, path)
    return path


@pytest.fixture
def digest(package):
    with Package.open(package) as opened:
        return opened.digest


@pytest.fixture
def make_key(tmp_path):
    """Makes a key pair in files: ``make_key("a")`` returns the private key of a.key and a.key.pub."""

    def make(name):
        generate_key_pair(tmp_path / f"{name}.key")
        return read_private_key(tmp_path / f"{name}.key")

    return make


@pytest.fixture
def key(make_key):
    return make_key("a")


@pytest.fixture
def other_key(make_key):
    return make_key("b")
