import base64
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from aotpack.errors import InputError, IntegrityError, OutputError
from aotpack.package import Package
from aotpack.trust import (
    MAX_SIGNATURE_FILE,
    PublicKey,
    Signature,
    Signatures,
    parse_signatures,
    read_signatures,
    sign,
    signature_path,
    trusted_keys,
)
from tests.trust.conftest import TINY

ASSETS = Path(__file__).parent / "assets"
KEY_ID = "ab5eb85ea8aa1c7e9996decc1b5e446a6c5682ee98947484e1c14be14fb7c998"
REMEDY = "fetch it again, or delete it and sign the package again"
HEX = "a SHA-256 in 64 lowercase hex digits"
ONLY = "no such field"
MANY = "one signature for each of at least one key"
SIGN = """
import os, signal, sys
from aotpack.cli import main
real = os.fsync
os.fsync = lambda fd: (real(fd), os.kill(os.getpid(), int(sys.argv[3])))
sys.exit(main(["sign", sys.argv[1], "--key", sys.argv[2]]))
"""


@pytest.fixture
def table():
    return json.loads((ASSETS / "tiny.aotpack.sig").read_bytes())


def parse(table):
    return parse_signatures(json.dumps(table).encode(), "x.sig")


def row(**changes):
    return lambda table: table["signatures"][0].update(changes)


def test_the_signature_of_the_first_release_still_verifies():
    signatures = parse_signatures((ASSETS / "tiny.aotpack.sig").read_bytes(), "tiny.aotpack.sig")
    with Package.open(TINY) as package:
        assert [each.verifies(package.digest) for each in signatures.signatures] == [True]
        trusted_keys(ASSETS / "release.key.pub").check(package.name, package.digest, signatures)


def test_what_is_signed_is_the_digest_behind_a_fixed_prefix(table):
    key = PublicKey.parse(ASSETS / "release.key.pub")
    value = base64.b64decode(table["signatures"][0]["signature"])
    assert key.verifies(value, b"aotpack.signatures/1 sha256:" + table["digest"].encode())
    assert not key.verifies(value, table["digest"].encode())


def test_what_is_written_is_read_back(package, digest, key):
    signed = sign(package, digest, key)
    assert read_signatures(package) == signed
    assert signed.digest == digest
    assert [each.key_id for each in signed.signatures] == [key.public.key_id]
    assert parse_signatures(signed.to_bytes(), "x") == signed


def test_the_file_lies_beside_the_package_and_follows_the_umask(package, digest, key):
    before = os.umask(0o027)
    try:
        sign(package, digest, key)
    finally:
        os.umask(before)
    path = package.with_name("tiny.aotpack.sig")
    assert signature_path(package) == path
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_package_without_signature_file_is_not_signed(package):
    assert read_signatures(package) is None


def test_signing_twice_with_one_key_changes_nothing(package, digest, key):
    sign(package, digest, key)
    facts = signature_path(package).stat()
    sign(package, digest, key)
    after = signature_path(package).stat()
    assert (after.st_ino, after.st_mtime_ns) == (facts.st_ino, facts.st_mtime_ns)


def test_two_signers_are_both_kept_and_their_order_does_not_matter(package, digest, key, other_key):
    sign(package, digest, key)
    both = sign(package, digest, other_key)
    assert {each.public_key for each in both.signatures} == {key.public, other_key.public}
    assert all(each.verifies(digest) for each in both.signatures)
    signature_path(package).unlink()
    sign(package, digest, other_key)
    assert sign(package, digest, key) == both


def test_signing_again_mends_a_signature_of_ones_own_and_keeps_others(package, digest, key, other_key):
    good = sign(package, digest, key)
    theirs = Signature(public_key=other_key.public, value=bytes(64))
    broken = Signature(public_key=key.public, value=bytes(64))
    signature_path(package).write_bytes(Signatures(digest=digest, signatures=(broken, theirs)).to_bytes())
    assert set(sign(package, digest, key).signatures) == {*good.signatures, theirs}


def test_a_signature_counts_for_its_own_package_and_key_only(package, digest, key, other_key):
    (signature,) = sign(package, digest, key).signatures
    assert signature.verifies(digest)
    assert not signature.verifies("0" * 64)
    assert not Signature(public_key=other_key.public, value=signature.value).verifies(digest)


@pytest.mark.parametrize("bit", range(0, 512, 37))
def test_a_flipped_bit_does_not_verify(bit, package, digest, key):
    (signature,) = sign(package, digest, key).signatures
    flipped = (int.from_bytes(signature.value) ^ (1 << bit)).to_bytes(64)
    assert not Signature(public_key=key.public, value=flipped).verifies(digest)


def test_signatures_of_another_package_are_not_added_to(package, digest, key, other_key):
    sign(package, "0" * 64, other_key)
    with pytest.raises(IntegrityError) as caught:
        sign(package, digest, key)
    assert str(caught.value) == (
        f"{package}.sig signs another package\n  expected: digest {digest}\n  found: digest {'0' * 64}\n"
        "  what to do: delete it if the package was built again, then sign"
    )


@pytest.mark.parametrize("digest", ["", "A" * 64, "0" * 63, "0" * 64 + "\n", None, 3])
def test_what_is_no_digest_is_not_signed(digest, package, key):
    with pytest.raises(InputError, match="that is not the digest of a package"):
        sign(package, digest, key)
    assert read_signatures(package) is None


@pytest.mark.parametrize(
    ("change", "field", "expected", "found"),
    [
        (lambda t: t.pop("schema"), "schema", "a value", "nothing"),
        (lambda t: t.update(schema="aotpack.package/1"), "schema", '"aotpack.signatures/1"',
         "'aotpack.package/1'"),
        (lambda t: t.update(schema="aotpack.signatures/1\n"), "schema", '"aotpack.signatures/1"',
         "'aotpack.signatures/1\\n'"),
        (lambda t: t.pop("digest"), "digest", "a value", "nothing"),
        (lambda t: t.update(digest="0" * 63), "digest", HEX, repr("0" * 63)),
        (lambda t: t.update(digest="A" * 64), "digest", HEX, repr("A" * 64)),
        (lambda t: t.update(digest=1), "digest", HEX, "1"),
        (lambda t: t.update(comment="trust me"), "comment", ONLY, "'trust me'"),
        (lambda t: t.update({"\x1b[2J\ud800": 0}), "\\x1b[2J\\ud800", ONLY, "0"),
        (lambda t: t.pop("signatures"), "signatures", "a value", "nothing"),
        (lambda t: t.update(signatures=[]), "signatures", MANY, "[]"),
        (lambda t: t.update(signatures={"a": 1}), "signatures", "a list", "{'a': 1}"),
        (lambda t: t.update(signatures=[None]), "signatures[0]", "an object", "None"),
        (lambda t: t["signatures"].append(3), "signatures[1]", "an object", "3"),
        (row(name="release"), "signatures[0].name", ONLY, "'release'"),
        (lambda t: t["signatures"][0].pop("key_id"), "signatures[0].key_id", "a value", "nothing"),
        (row(key_id="0" * 64), "signatures[0].key_id", f"the SHA-256 of its public key, {KEY_ID}",
         repr("0" * 64)),
        (row(key_id=None), "signatures[0].key_id", HEX, "None"),
        (lambda t: t["signatures"][0].pop("public_key"), "signatures[0].public_key", "a value", "nothing"),
        (row(public_key="00"), "signatures[0].public_key",
         "an Ed25519 public key in 64 lowercase hex digits", "'00'"),
        (lambda t: t["signatures"][0].pop("signature"), "signatures[0].signature", "a value", "nothing"),
        (row(signature="A" * 84), "signatures[0].signature", "64 bytes in base64",
         repr("A" * 84)),
        (row(signature="A" * 85 + "B=="), "signatures[0].signature", "64 bytes in base64",
         repr("A" * 85 + "B==")),
        (row(signature=["A"]), "signatures[0].signature", "64 bytes in base64", "['A']"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_named(change, field, expected, found, table):
    change(table)
    with pytest.raises(IntegrityError) as caught:
        parse(table)
    assert str(caught.value) == (
        f"signature file x.sig field '{field}' is wrong\n"
        f"  expected: {expected}\n  found: {found}\n  what to do: {REMEDY}"
    )


def test_two_signatures_by_one_key_are_refused(table):
    table["signatures"] *= 2
    with pytest.raises(IntegrityError, match=f"field 'signatures' is wrong\n  expected: {MANY}\n"):
        parse(table)


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b'{"schema"', "Expecting ':' delimiter: line 1 column 10 (char 9)"),
        (b'{"a": 1, "a": 2}', "field 'a' twice"),
        (b'[{"schema": 1, "schema": 1}]', "field 'schema' twice"),
        ("\u00e9".encode(), "'ascii' codec can't decode byte 0xc3 in position 0: ordinal not in range(128)"),
    ],
)
def test_what_is_not_ascii_json_is_refused(data, found):
    with pytest.raises(IntegrityError) as caught:
        parse_signatures(data, "x.sig")
    assert str(caught.value) == (
        f"x.sig is not a signature file\n  expected: ASCII JSON\n  found: {found}\n  what to do: {REMEDY}"
    )


@pytest.mark.parametrize("data", [b"null", b"[]", b'"x"', b"1" * 9999, b"[" * 60000, b'{"a":' * 9999])
def test_other_json_is_refused(data):
    with pytest.raises(IntegrityError, match="signature file"):
        parse_signatures(data, "x.sig")


@pytest.mark.parametrize("schema", ["aotpack.signatures/2", "aotpack.signatures/0", "aotpack.signatures/01"])
def test_a_format_of_another_release_is_refused(schema, table):
    table.update(schema=schema, later=True)
    with pytest.raises(IntegrityError) as caught:
        parse(table)
    assert str(caught.value) == (
        "x.sig has a signature format that this aotpack does not read\n"
        f"  expected: aotpack.signatures/1\n  found: {schema}\n"
        "  what to do: install the aotpack release that wrote it, or sign the package again"
    )


def test_a_file_past_the_limit_is_refused_and_no_more_of_it_is_read(package, table):
    text = json.dumps(table)
    assert parse_signatures(text.ljust(MAX_SIGNATURE_FILE).encode(), "x.sig").digest == table["digest"]
    path = signature_path(package)
    path.write_text(text)
    os.truncate(path, 1 << 40)
    with pytest.raises(IntegrityError) as caught:
        read_signatures(package)
    assert str(caught.value) == (
        f"{path} is not a signature file\n  expected: at most 65536 bytes\n  found: more\n"
        f"  what to do: {REMEDY}"
    )


def test_more_signers_than_fit_are_refused(package, digest, key):
    crowd = (Signature(public_key=PublicKey(bytes([0, i] * 16)), value=bytes(64)) for i in range(256))
    with pytest.raises(InputError, match="a signature file cannot hold that many signatures"):
        Signatures(digest=digest, signatures=tuple(crowd)).to_bytes()


@pytest.mark.parametrize(
    ("make", "problem"), [(Path.mkdir, "cannot be read: Is a directory"), (os.mkfifo, "is not a file")]
)
def test_what_is_no_file_is_refused(make, problem, package):
    path = signature_path(package)
    make(path)
    with pytest.raises(InputError) as caught:
        read_signatures(package)
    assert caught.value.problem == f"{path} {problem}"


def test_a_folder_that_is_not_there_is_named(tmp_path, digest, key):
    with pytest.raises(OutputError, match=r"x\.aotpack\.sig cannot be written: No such file or directory"):
        sign(tmp_path / "nowhere" / "x.aotpack", digest, key)


def test_a_disk_that_is_full_leaves_what_was_there(package, digest, key, other_key):
    before = sign(package, digest, key)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written: File too large"):
            sign(package, digest, other_key)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read_signatures(package) == before
    assert not list(package.parent.glob(".aotpack-*"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 130), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_signer_that_is_ended_before_the_rename_leaves_what_was_there(
    number, code, package, digest, key, other_key
):
    before = sign(package, digest, key)
    command = [sys.executable, "-c", SIGN, str(package), str(package.parent / "b.key"), str(int(number))]
    assert subprocess.run(command, capture_output=True, check=False).returncode == code
    assert read_signatures(package) == before
    if number != signal.SIGKILL:
        assert not list(package.parent.glob(".aotpack-*"))
    assert len(sign(package, digest, other_key).signatures) == 2


def test_a_flipped_byte_of_the_file_is_never_trusted(package, digest, key):
    sign(package, digest, key)
    path, policy = signature_path(package), trusted_keys(key.public)
    good = path.read_bytes()
    for place in range(len(good)):
        changed = bytearray(good)
        changed[place] ^= 1
        path.write_bytes(changed)
        try:
            signatures = read_signatures(package)
            policy.check("x", digest, signatures)
        except IntegrityError:
            continue
        # White space between fields may be another: what was read is the same.
        assert signatures == parse_signatures(good, "x")


def test_a_truncated_file_is_refused(package, digest, key):
    sign(package, digest, key)
    path = signature_path(package)
    good = path.read_bytes().rstrip()
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        with pytest.raises(IntegrityError):
            read_signatures(package)
