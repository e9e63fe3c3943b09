"""What this process says of its machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aotpack.runtime import host
from aotpack.targets.facts import version


@pytest.fixture
def library() -> Path:
    """The C++ library of this process."""
    maps = Path("/proc/self/maps").read_text()
    (path,) = set(re.findall(r"\S+/libstdc\+\+\.so\.6\S*$", maps, re.MULTILINE))
    return Path(path)


def test_the_version_of_libstdcxx_is_the_highest_in_the_whole_file(library):
    everywhere = re.findall(rb"GLIBCXX_(\d+\.\d+(?:\.\d+)?)\0", library.read_bytes())
    assert host._libstdcxx() == max((found.decode() for found in everywhere), key=version)


def test_version_names_are_a_small_part_of_the_file(library):
    names = host._version_names(library)
    assert b"\0GLIBCXX_3.4\0" in names
    assert len(names) * 4 < library.stat().st_size


@pytest.mark.parametrize("size", [0, 63, 64, 4096])
def test_a_library_that_is_cut_short_is_an_error_that_is_expected(library, tmp_path, size):
    (tmp_path / "short.so").write_bytes(library.read_bytes()[:size])
    with pytest.raises((ValueError, host.struct.error)):
        host._version_names(tmp_path / "short.so")


def test_a_library_without_versions_is_one_too(library, tmp_path):
    data = bytearray(library.read_bytes())
    data[0x3C:0x3E] = b"\0\0"
    (tmp_path / "none.so").write_bytes(data)
    with pytest.raises(ValueError, match="defines no versions"):
        host._version_names(tmp_path / "none.so")
