import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from aotpack.errors import HostError, InputError, OutputError
from aotpack.trust import PublicKey, generate_key_pair, read_private_key

ASSETS = Path(__file__).parent / "assets"
RELEASE = PublicKey(bytes.fromhex("4e676612fb52c540ff2503461ae4b714dcfc1383b22c5532f669e209f5b7949b"))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.key"


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_pair_is_two_files_and_only_the_owner_reads_the_private_one(path):
    before = os.umask(0)
    try:
        key = generate_key_pair(path)
    finally:
        os.umask(before)
    assert sorted(each.name for each in path.parent.iterdir()) == ["a.key", "a.key.pub"]
    assert (mode(path), mode(path.with_name("a.key.pub"))) == (0o600, 0o666)
    assert PublicKey.parse(path.with_name("a.key.pub")) == key
    assert read_private_key(path).public == key
    assert path.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")


def test_two_pairs_differ(tmp_path):
    assert generate_key_pair(tmp_path / "a") != generate_key_pair(tmp_path / "b")


def test_what_a_private_key_signs_its_public_key_verifies(path):
    generate_key_pair(path)
    key = read_private_key(path)
    assert key.public.verifies(key.sign(b"message"), b"message")
    assert not key.public.verifies(key.sign(b"message"), b"another")
    assert not key.public.verifies(b"", b"message")
    assert not PublicKey(b"short").verifies(key.sign(b"message"), b"message")


def test_printing_a_private_key_shows_its_public_half_only(path):
    key = generate_key_pair(path)
    assert repr(read_private_key(path)) == f"PrivateKey(public={key!r})"


def test_the_public_file_is_what_cryptography_reads_and_writes(path):
    key = generate_key_pair(path)
    data = path.with_name("a.key.pub").read_bytes()
    read = serialization.load_pem_public_key(data)
    assert isinstance(read, Ed25519PublicKey)
    assert read.public_bytes_raw() == key.raw
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    assert read.public_bytes(serialization.Encoding.PEM, form) == data


def test_the_id_is_the_sha256_of_the_raw_key():
    assert RELEASE.key_id == hashlib.sha256(RELEASE.raw).hexdigest()


@pytest.mark.parametrize(
    "source",
    [
        ASSETS / "release.key.pub",
        str(ASSETS / "release.key.pub"),
        RELEASE.raw.hex(),
        RELEASE.raw.hex().upper() + "\n",
        RELEASE.to_pem(),
        RELEASE.to_pem().replace("\n", "\r\n"),
    ],
)
def test_a_public_key_is_a_file_or_hex_or_pem(source):
    assert PublicKey.parse(source) == RELEASE


def test_a_file_may_hold_hex(tmp_path):
    path = tmp_path / "a.pub"
    path.write_text(RELEASE.raw.hex() + "\n")
    assert PublicKey.parse(path) == RELEASE


def other_kind():
    return (
        ec.generate_private_key(ec.SECP256R1())
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        .decode()
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no key",
        RELEASE.raw.hex()[:-1],
        RELEASE.raw.hex() * 2,
        RELEASE.to_pem()[:-3],
        RELEASE.to_pem() * 2,
        RELEASE.to_pem().replace("lJs=", "lJt="),
        RELEASE.to_pem().replace("MCow", "MCox"),
        "\x00\xff",
        other_kind(),
    ],
)
def test_a_file_without_a_public_key_is_refused(text, tmp_path):
    path = tmp_path / "a.pub"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as caught:
        PublicKey.parse(path)
    assert str(caught.value) == (
        f"{path} is not an Ed25519 public key\n"
        "  expected: PEM as aotpack keygen writes it, or 64 hex digits\n  what to do: name a .pub file"
    )


def test_a_private_key_given_as_a_public_one_is_not_repeated(path):
    generate_key_pair(path)
    for source, name in ((path, str(path)), (path.read_text(), "the text")):
        with pytest.raises(InputError) as caught:
            PublicKey.parse(source)
        assert str(caught.value) == (
            f"{name} is not an Ed25519 public key\n"
            "  expected: PEM as aotpack keygen writes it, or 64 hex digits\n  found: a private key\n"
            "  what to do: name the public key, which ends in .pub"
        )


@pytest.mark.parametrize("name", ["nowhere.pub", "\0", "", "x" * 300])
def test_a_public_key_that_cannot_be_read_is_named(name, tmp_path):
    with pytest.raises(InputError, match=r"there is no public key at|cannot be read"):
        PublicKey.parse(tmp_path / name)


@pytest.mark.parametrize("taken", ["a.key", "a.key.pub"])
@pytest.mark.parametrize("what", ["file", "dangling link"])
def test_nothing_is_overwritten_and_nothing_is_left(taken, what, path):
    there = path.with_name(taken)
    if what == "file":
        there.write_text("precious")
    else:
        there.symlink_to(path.with_name("elsewhere"))
    with pytest.raises(OutputError) as caught:
        generate_key_pair(path)
    assert str(caught.value) == f"{there} is there already\n  what to do: choose another name, or remove it"
    assert list(path.parent.iterdir()) == [there]
    assert what == "dangling link" or there.read_text() == "precious"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        generate_key_pair(tmp_path / "nowhere" / "a.key")


@pytest.mark.parametrize("shared", [0o640, 0o604, 0o620, 0o610, 0o777])
def test_a_private_key_that_others_can_reach_is_refused(shared, path):
    generate_key_pair(path)
    path.chmod(shared)
    with pytest.raises(InputError) as caught:
        read_private_key(path)
    assert str(caught.value) == (
        f"{path} is a private key that other users can reach\n"
        f"  expected: permissions 600\n  found: permissions {shared:o}\n"
        f"  what to do: chmod 600 {path}, and make a new key if somebody may have read this one"
    )


def test_a_private_key_may_be_read_only(path):
    key = generate_key_pair(path)
    path.chmod(0o400)
    assert read_private_key(path).public == key


def test_an_encrypted_key_needs_its_password(path):
    key = generate_key_pair(path, password=b"secret")
    assert read_private_key(path, password=b"secret").public == key
    with pytest.raises(InputError) as caught:
        read_private_key(path)
    assert str(caught.value) == (
        f"{path} is encrypted\n  what to do: set AOTPACK_KEY_PASSWORD to its password"
    )
    with pytest.raises(InputError) as caught:
        read_private_key(path, password=b"wrong")
    assert str(caught.value) == (
        f"{path} cannot be read as a private key\n  what to do: check AOTPACK_KEY_PASSWORD"
    )


def test_a_key_that_is_not_encrypted_needs_no_password(path):
    key = generate_key_pair(path)
    assert read_private_key(path, password=b"of another key").public == key


def test_a_password_that_is_too_long_leaves_no_file(path):
    with pytest.raises(InputError, match="the password cannot be used"):
        generate_key_pair(path, password=b"x" * 5000)
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("data", [b"", b"no key", b"-----BEGIN PRIVATE KEY-----\nMC4C\n", b"\xff" * 99])
def test_a_file_without_a_private_key_is_refused(data, path):
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(InputError) as caught:
        read_private_key(path)
    assert str(caught.value) == (
        f"{path} cannot be read as a private key\n  what to do: name a file that aotpack keygen wrote"
    )


def test_a_private_key_of_another_kind_is_refused(path):
    data = ec.generate_private_key(ec.SECP256R1()).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(InputError, match="is not an Ed25519 private key"):
        read_private_key(path)


def test_a_private_key_that_is_not_there_is_named(path):
    with pytest.raises(InputError, match="there is no private key at"):
        read_private_key(path)


@pytest.mark.parametrize(
    "call",
    [
        "generate_key_pair(path)",
        "read_private_key(path)",
        "PublicKey(bytes(32)).verifies(bytes(64), b'')",
    ],
)
def test_without_cryptography_the_error_says_what_to_install(call, path):
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from aotpack.trust import *\nfrom aotpack.errors import HostError\n"
        f"path = {str(path)!r}\ntry:\n    {call}\nexcept HostError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    problem, _, remedy = done.stdout.splitlines()
    assert problem == "signatures need the package cryptography, which cannot be imported"
    assert remedy == "  what to do: pip install 'aotpack[sign]'"
    assert HostError.exit_code == 5
    assert not path.exists()
