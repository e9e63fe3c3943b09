"""doctor: this machine as it is, and with one thing wrong."""

import pytest

from aotpack.build import worker
from aotpack.cli.checks import BUILDERS
from tests.process import aotpack, only_object


def checks(done):
    return {check["name"]: check for check in only_object(done)["checks"]}


def test_this_machine_can_build_and_run():
    done = aotpack("doctor", "--json")
    found = only_object(done)
    assert (done.returncode, found["runs"], found["builds"]) == (0, True, True)
    assert found["host"]["machine"]
    assert {"python", "torch", "compiler", "binutils", "cache folder", "cpu", "glibc", "cuda devices"} <= set(
        checks(done)
    )


def test_a_missing_compiler_only_keeps_from_building():
    done = aotpack("doctor", "--json", CXX="no-such-compiler")
    compiler = checks(done)["compiler"]
    assert (done.returncode, compiler["ok"], compiler["needed_for"]) == (0, False, "build")
    assert "install g++" in compiler["remedy"]


@pytest.mark.parametrize("place", ["/dev/null", "/proc/nowhere"])
def test_an_unusable_cache_folder_keeps_from_running(place):
    done = aotpack("doctor", "--json", AOTPACK_CACHE=place)
    folder = checks(done)["cache folder"]
    assert (done.returncode, folder["ok"]) == (5, False)
    assert "AOTPACK_CACHE" in folder["remedy"]
    assert "packages cannot run here: cache folder" in done.stderr


def test_it_names_the_torch_releases_that_the_builder_takes():
    assert worker.TRIED == BUILDERS


def test_nothing_is_left_in_the_temp_folder(tmp_path):
    assert aotpack("doctor", "-q", TMPDIR=str(tmp_path)).returncode == 0
    assert list(tmp_path.iterdir()) == []
