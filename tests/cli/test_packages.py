"""inspect, verify, explain and selftest on a package that was built here."""

import subprocess
import sys
from dataclasses import replace

import pytest

from aotpack.package import Package, write_package
from tests.process import aotpack, only_object, rewritten

WITHOUT_TORCH = (
    "import sys; sys.modules['torch'] = None; from aotpack.cli import main; sys.exit(main(sys.argv[1:]))"
)


@pytest.fixture
def altered(dflash_package, tmp_path):
    """The package with one byte of its last blob changed."""
    data = bytearray(dflash_package.read_bytes())
    data[-9] ^= 1
    path = tmp_path / "altered.aotpack"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_it_works_without_torch(command, dflash_package):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, command, str(dflash_package)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_says_what_is_in_a_package(dflash_package):
    found = only_object(aotpack("inspect", dflash_package, "--json"))
    assert found["schema"] == "aotpack.inspect/1"
    assert found["bytes"] == dflash_package.stat().st_size
    assert found["specs"]["full"]["spec"]["heads"] == 14
    assert "torch" in found["provenance"]
    (variant,) = found["variants"]
    assert variant["specs"] == ["full"]
    assert [program["name"] for program in variant["programs"]] == ["block_mask", "forward", "backward"]
    assert 0 < variant["bytes"] < variant["raw_bytes"]
    assert variant["requires"]["glibc"].startswith("2.")


def test_inspect_prints_a_page_for_people(dflash_package):
    done = aotpack("inspect", dflash_package)
    assert (done.returncode, done.stderr) == (0, "")
    assert "14/2 heads of 64, bfloat16, scale 0.125, dflash(block_size=16)" in done.stdout


def test_verify_hashes_every_blob(dflash_package):
    done = aotpack("verify", dflash_package, "--json")
    with Package.open(dflash_package) as package:
        assert only_object(done)["blobs"] == len(package.manifest.blobs)
        assert only_object(done)["digest"] == package.digest


def test_verify_refuses_an_altered_package(altered):
    done = aotpack("verify", altered, "--json")
    assert done.returncode == 4
    assert only_object(done)["error"] == "IntegrityError"
    assert "1 of its" in only_object(done)["problem"]


def test_what_is_no_package_is_refused():
    done = aotpack("inspect", sys.executable)
    assert (done.returncode, done.stdout) == (4, "")
    assert "is not an aotpack package" in done.stderr


def test_explain_names_the_variant_that_load_takes(dflash_package):
    done = aotpack("explain", dflash_package, "--json")
    found = only_object(done)
    assert (done.returncode, found["runs"]) == (0, True)
    assert [(row["spec"], row["status"], row["code"]) for row in found["variants"]] == [
        ("full", "optimal", "accepted")
    ]


def test_explain_gives_the_reason_of_every_refusal(dflash_package):
    done = aotpack("explain", dflash_package, "--device", "cuda:3", "--json")
    found = only_object(done)
    assert (done.returncode, found["runs"]) == (3, False)
    assert [(row["status"], row["code"]) for row in found["variants"]] == [("refused", "device-type")]
    assert "no variant runs on cuda:3" in done.stderr


def test_selftest_passes_on_this_machine(dflash_package):
    done = aotpack("selftest", dflash_package, "--json")
    found = only_object(done)
    assert (done.returncode, found["passed"]) == (0, True)
    assert [check["what"] for check in found["checks"]] == [
        "out",
        "lse",
        "grad.q",
        "grad.k",
        "grad.v",
        "empty rows",
        "all rows empty",
    ]


def test_selftest_exits_7_where_results_are_too_far_off(dflash_package, tmp_path):
    strict = rewritten(dflash_package, tmp_path / "strict.aotpack", tolerance=1e-12)
    done = aotpack("selftest", strict, "--json")
    assert done.returncode == 7
    assert only_object(done)["passed"] is False
    assert "do not train with this package here" in done.stderr


def test_selftest_refuses_a_device_that_has_no_variant(dflash_package):
    assert aotpack("selftest", dflash_package, "--device", "cuda").returncode == 3


def test_explain_refuses_what_load_refuses(dflash_package, tmp_path):
    with Package.open(dflash_package) as package:
        blobs = {key: package.read_blob(key) for key in package.manifest.blobs}
        manifest = replace(package.manifest, calling_convention=99)
    write_package(tmp_path / "later.aotpack", manifest, blobs)
    done = aotpack("explain", tmp_path / "later.aotpack")
    assert done.returncode == 5
    assert "uses a calling convention that this aotpack does not know" in done.stderr
