"""keygen, sign and verify: who made a package, and whether that is somebody to trust."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from aotpack.package import Package, write_package
from tests.process import aotpack, only_object

TESTS = Path(__file__).parent.parent
RELEASE = TESTS / "trust" / "assets" / "release.key.pub"
WITHOUT_CRYPTOGRAPHY = """
import sys
sys.modules["cryptography"] = sys.modules["torch"] = None
from aotpack.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def package(tmp_path):
    return Path(shutil.copyfile(TESTS / "package" / "assets" / "tiny.aotpack", tmp_path / "tiny.aotpack"))


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "a.key"
    assert aotpack("keygen", "-o", path).returncode == 0
    return path


@pytest.fixture
def signed(package, key):
    assert aotpack("sign", package, "--key", key).returncode == 0
    return package


def key_id(key):
    signature = json.loads(key.with_name("tiny.aotpack.sig").read_text())["signatures"][0]
    return signature["key_id"]


def repacked(package, path):
    """The same specs and blobs with another provenance: other bytes."""
    with Package.open(package) as opened:
        blobs = {key: opened.read_blob(key) for key in opened.manifest.blobs}
        write_package(path, replace(opened.manifest, provenance={"torch": "2.13.0"}), blobs)


def test_keygen_makes_two_files_and_overwrites_none(tmp_path):
    name = tmp_path / "mine.key"
    found = only_object(aotpack("keygen", "-o", name, "--json"))
    assert found["schema"] == "aotpack.keygen/1"
    assert (found["private_key"], found["public_key"]) == (str(name), f"{name}.pub")
    assert (len(found["key_id"]), found["encrypted"]) == (64, False)
    assert (name.stat().st_mode & 0o777) == 0o600
    before = name.read_bytes()
    done = aotpack("keygen", "-o", name, "--json")
    assert (done.returncode, only_object(done)["error"]) == (2, "OutputError")
    assert name.read_bytes() == before


def test_keygen_and_sign_take_a_password_from_the_environment(package, tmp_path):
    key = tmp_path / "a.key"
    done = aotpack("keygen", "-o", key, "--json", AOTPACK_KEY_PASSWORD="secret")
    assert only_object(done)["encrypted"] is True
    assert aotpack("sign", package, "--key", key).returncode == 2
    assert aotpack("sign", package, "--key", key, AOTPACK_KEY_PASSWORD="wrong").returncode == 2
    assert not package.with_name("tiny.aotpack.sig").exists()
    assert aotpack("sign", package, "--key", key, AOTPACK_KEY_PASSWORD="secret").returncode == 0


def test_sign_says_who_signed(package, key):
    found = only_object(aotpack("sign", package, "--key", key, "--json"))
    assert found["schema"] == "aotpack.sign/1"
    assert found["signature_file"] == f"{package}.sig"
    assert found["signed_by"] == [found["key_id"]]
    assert found == only_object(aotpack("sign", package, "--key", key, "--json"))


def test_sign_refuses_an_altered_package(package, key):
    data = bytearray(package.read_bytes())
    data[-9] ^= 1
    package.write_bytes(data)
    assert aotpack("sign", package, "--key", key).returncode == 4
    assert not package.with_name("tiny.aotpack.sig").exists()


def test_sign_refuses_a_key_that_others_can_read(package, key):
    key.chmod(0o644)
    done = aotpack("sign", package, "--key", key)
    assert done.returncode == 2
    assert f"chmod 600 {key}" in done.stderr


def test_verify_reports_an_unsigned_package_and_trusts_nothing(package):
    done = aotpack("verify", package, "--json")
    found = only_object(done)
    assert (done.returncode, found["schema"]) == (0, "aotpack.verify/1")
    assert (found["signatures"], found["policy"], found["trusted"]) == ([], None, None)
    text = aotpack("verify", package).stdout
    assert "signed by  nobody" in text
    assert "trusted    nothing says so: name keys or a digest (--key, --digest)" in text


def test_verify_reports_who_signed_and_trusts_nothing(signed, key):
    found = only_object(aotpack("verify", signed, "--json"))
    assert found["signatures"] == [{"key_id": key_id(key), "valid": True}]
    assert (found["policy"], found["trusted"]) == (None, None)
    text = aotpack("verify", signed).stdout
    assert f"signed by  {key_id(key)}\n" in text
    assert "trusted    nothing says so" in text


def test_verify_accepts_a_signature_by_a_named_key(signed, key):
    done = aotpack("verify", signed, "--key", RELEASE, "--key", f"{key}.pub", "--json")
    found = only_object(done)
    assert (done.returncode, found["trusted"]) == (0, True)
    assert found["policy"].endswith(f" or {key_id(key)}")
    assert "trusted    yes: a signature by key" in aotpack("verify", signed, "--key", f"{key}.pub").stdout


def test_verify_refuses_a_signature_by_another_key_only(signed):
    done = aotpack("verify", signed, "--key", RELEASE, "--json")
    assert (done.returncode, only_object(done)["error"]) == (4, "TrustError")
    assert "(not trusted)" in only_object(done)["found"]


def test_verify_refuses_an_unsigned_package_where_a_key_is_named(package):
    done = aotpack("verify", package, "--key", RELEASE)
    assert (done.returncode, done.stdout) == (4, "")
    assert "not signed" in done.stderr


def test_verify_compares_the_digest(package, key):
    digest = only_object(aotpack("verify", package, "--json"))["digest"]
    assert only_object(aotpack("verify", package, "--digest", digest, "--json"))["trusted"] is True
    assert aotpack("verify", package, "--digest", "0" * 64).returncode == 4
    assert aotpack("verify", package, "--digest", "0" * 64, "--digest", digest).returncode == 0
    assert aotpack("verify", package, "--digest", digest[:12]).returncode == 2
    assert aotpack("verify", package, "--digest", digest, "--key", f"{key}.pub").returncode == 4


def test_verify_takes_keys_from_the_environment_unless_told_otherwise(signed, key):
    ours = os.pathsep.join([str(RELEASE), f"{key}.pub"])
    found = only_object(aotpack("verify", signed, "--json", AOTPACK_TRUSTED_KEYS=ours))
    assert found["trusted"] is True
    assert aotpack("verify", signed, AOTPACK_TRUSTED_KEYS=str(RELEASE)).returncode == 4
    assert aotpack("verify", signed, "--key", f"{key}.pub", AOTPACK_TRUSTED_KEYS=str(RELEASE)).returncode == 0
    assert aotpack("verify", signed, AOTPACK_TRUSTED_KEYS="").returncode == 2


@pytest.mark.parametrize("options", [[], ["--key"]])
def test_a_package_that_was_packed_again_has_not_been_signed(options, signed, key):
    repacked(signed, signed)
    done = aotpack("verify", signed, *(options and ["--key", f"{key}.pub"]), "--json")
    found = only_object(done)
    assert (done.returncode, found["error"]) == (4, "TrustError")
    assert "signatures of digest " in found["found"]
    assert aotpack("sign", signed, "--key", key).returncode == 4


@pytest.mark.parametrize("options", [[], ["--key"]])
def test_a_signature_that_does_not_verify_is_refused(options, signed, key):
    path = Path(f"{signed}.sig")
    table = json.loads(path.read_text())
    value = table["signatures"][0]["signature"]
    table["signatures"][0]["signature"] = ("B" if value[0] == "A" else "A") + value[1:]
    path.write_text(json.dumps(table))
    done = aotpack("verify", signed, *(options and ["--key", f"{key}.pub"]), "--json")
    found = only_object(done)
    assert (done.returncode, found["error"]) == (4, "TrustError")
    assert key_id(key) in found["found"]


def test_a_signature_file_that_is_not_one_is_refused(signed):
    Path(f"{signed}.sig").write_text("{}")
    done = aotpack("verify", signed, "--json")
    assert (done.returncode, only_object(done)["error"]) == (4, "IntegrityError")


def test_verify_refuses_an_altered_package_whoever_signed_it(signed, key):
    data = bytearray(signed.read_bytes())
    data[-9] ^= 1
    signed.write_bytes(data)
    done = aotpack("verify", signed, "--key", f"{key}.pub", "--json")
    assert (done.returncode, only_object(done)["error"]) == (4, "IntegrityError")


def without_cryptography(*arguments):
    command = [sys.executable, "-c", WITHOUT_CRYPTOGRAPHY, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_without_cryptography_what_needs_it_exits_5(signed, key, tmp_path):
    for command in (
        ["keygen", "-o", tmp_path / "b.key"],
        ["sign", signed, "--key", key],
        ["verify", signed, "--key", f"{key}.pub"],
    ):
        done = without_cryptography(*command)
        assert (done.returncode, done.stdout) == (5, "")
        assert "pip install 'aotpack[sign]'" in done.stderr


def test_without_cryptography_verify_says_what_it_did_not_check(signed, key):
    done = without_cryptography("verify", signed, "--json")
    assert (done.returncode, only_object(done)["signatures"]) == (0, [{"key_id": key_id(key), "valid": None}])
    assert "not checked: pip install 'aotpack[sign]'" in without_cryptography("verify", signed).stdout
    assert without_cryptography("verify", signed, "--digest", only_object(done)["digest"]).returncode == 0
