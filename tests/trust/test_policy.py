import dataclasses
import os
import subprocess
import sys
import warnings

import pytest

from aotpack.errors import InputError, IntegrityError, TrustError
from aotpack.trust import (
    PublicKey,
    Signature,
    Signatures,
    all_of,
    any_of,
    pinned,
    policy_from_environment,
    sign,
    trusted_keys,
    unsafe_accept_anything,
)

OTHER = "0" * 64
FETCH = "fetch the package and its .sig again from where you trust"
PIN = "fetch the package that was pinned, or pin this one if you know where it is from"
UNSIGNED = "fetch its .sig too, or have it signed: aotpack sign FILE --key KEY"
UNTRUSTED = "have it signed by a trusted key, or trust the key that signed it if you know whose it is"
ANYTHING = """
import threading, warnings
from aotpack.trust import any_of, pinned, unsafe_accept_anything

warnings.simplefilter("always")
start = threading.Barrier(8)

def check():
    start.wait()
    for policy in (unsafe_accept_anything(), any_of(pinned("0" * 64), unsafe_accept_anything())):
        policy.check("x", "1" * 64, None)

threads = [threading.Thread(target=check) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


@pytest.fixture
def signed(package, digest, key):
    return sign(package, digest, key)


def refusal(policy, digest, signatures):
    with pytest.raises(TrustError) as caught:
        policy.check("x.aotpack", digest, signatures)
    assert isinstance(caught.value, IntegrityError)
    assert caught.value.exit_code == 4
    return caught.value


def accepts(policy, digest, signatures=None):
    try:
        policy.check("x.aotpack", digest, signatures)
    except TrustError:
        return False
    return True


def test_a_pinned_digest_is_accepted_signed_or_not(digest, signed):
    policy = pinned(OTHER, digest)
    assert not policy.needs_signatures
    assert accepts(policy, digest)
    assert accepts(policy, digest, signed)
    assert accepts(policy, digest, dataclasses.replace(signed, digest=OTHER))


def test_another_digest_than_the_pinned_one_is_refused(digest, signed):
    assert str(refusal(pinned(OTHER), digest, signed)) == (
        f"x.aotpack is not trusted\n  expected: digest {OTHER}\n  found: digest {digest}\n  what to do: {PIN}"
    )


def test_a_signature_by_a_trusted_key_is_accepted(digest, signed, key, other_key):
    assert trusted_keys(key.public).needs_signatures
    assert accepts(trusted_keys(key.public), digest, signed)
    assert accepts(trusted_keys(other_key.public, key.public), digest, signed)


def test_an_unsigned_package_is_refused(digest, key):
    assert str(refusal(trusted_keys(key.public), digest, None)) == (
        f"x.aotpack is not trusted\n  expected: a signature by key {key.public.key_id}\n"
        f"  found: digest {digest}, not signed\n  what to do: {UNSIGNED}"
    )


def test_a_key_is_not_trusted_because_it_is_in_the_file(digest, signed, key, other_key):
    assert str(refusal(trusted_keys(other_key.public), digest, signed)) == (
        f"x.aotpack is not trusted\n  expected: a signature by key {other_key.public.key_id}\n"
        f"  found: digest {digest}, signed by key {key.public.key_id} (not trusted)\n"
        f"  what to do: {UNTRUSTED}"
    )


def test_the_id_of_a_key_given_as_a_key_is_explained(digest, signed, key):
    error = refusal(trusted_keys(key.public.key_id), digest, signed)
    assert error.remedy == "give the public key itself: what was given is the id of one"


def test_signatures_of_another_package_are_refused(digest, signed, key):
    moved = dataclasses.replace(signed, digest=OTHER)
    assert str(refusal(trusted_keys(key.public), digest, moved)) == (
        "x.aotpack is not trusted: its signature file is one of another package\n"
        f"  expected: a signature by key {key.public.key_id}\n"
        f"  found: digest {digest}, signatures of digest {OTHER}\n  what to do: {FETCH}"
    )


def test_a_signature_file_that_only_claims_the_digest_is_refused(package, digest, key):
    real = sign(package, OTHER, key)
    error = refusal(trusted_keys(key.public), digest, dataclasses.replace(real, digest=digest))
    assert str(error) == (
        "x.aotpack is not trusted: a signature of a trusted key does not verify\n"
        f"  expected: a signature by key {key.public.key_id}\n"
        f"  found: digest {digest}, signed by key {key.public.key_id} (does not verify)\n"
        f"  what to do: {FETCH}"
    )


def test_one_bad_signature_by_a_trusted_key_outweighs_a_good_one(package, digest, key, other_key):
    (good,) = sign(package, digest, key).signatures
    bad = Signature(public_key=other_key.public, value=bytes(64))
    both = Signatures(digest=digest, signatures=(good, bad))
    for policy in (
        trusted_keys(key.public, other_key.public),
        any_of(trusted_keys(key.public), trusted_keys(other_key.public)),
        any_of(pinned(digest), trusted_keys(other_key.public)),
    ):
        assert refusal(policy, digest, both).problem.endswith("a signature of a trusted key does not verify")


def test_a_bad_signature_by_a_stranger_changes_nothing(digest, signed, key, other_key):
    bad = Signature(public_key=other_key.public, value=bytes(64))
    both = Signatures(digest=digest, signatures=(*signed.signatures, bad))
    assert accepts(trusted_keys(key.public), digest, both)


def test_a_threshold_counts_different_trusted_keys(package, digest, key, other_key, make_key):
    third = make_key("c").public
    policy = trusted_keys(key.public, other_key.public, third, threshold=2)
    one = sign(package, digest, key)
    error = refusal(policy, digest, one)
    ids = ", ".join(each.key_id for each in (key.public, other_key.public, third))
    assert error.expected == f"signatures by 2 of the keys {ids}"
    assert error.found == f"digest {digest}, signed by key {key.public.key_id} (valid)"
    assert not accepts(policy, digest, dataclasses.replace(one, signatures=one.signatures * 2))
    assert accepts(policy, digest, sign(package, digest, other_key))


@pytest.mark.parametrize("threshold", [0, -1, 2, True, 1.0, "1", None])
def test_a_threshold_that_cannot_be_meant_is_refused(threshold, key):
    with pytest.raises(InputError) as caught:
        trusted_keys(key.public, key.public.to_pem(), key.public.raw.hex(), threshold=threshold)
    assert str(caught.value) == (
        "the threshold of trusted_keys() is wrong\n"
        f"  expected: an integer from 1 to 1, the number of different keys\n  found: {threshold!r}"
    )


def test_any_of_needs_one_and_all_of_needs_each(digest, signed, key, other_key):
    pin, wrong_pin = pinned(digest), pinned(OTHER)
    by_key, by_other = trusted_keys(key.public), trusted_keys(other_key.public)
    assert accepts(any_of(wrong_pin, by_key), digest, signed)
    assert accepts(any_of(pin, by_other), digest)
    assert not accepts(any_of(wrong_pin, by_other), digest, signed)
    assert accepts(all_of(pin, by_key), digest, signed)
    assert not accepts(all_of(pin, by_other), digest, signed)
    assert not accepts(all_of(wrong_pin, by_key), digest, signed)
    assert accepts(all_of(any_of(wrong_pin, pin), any_of(by_key, by_other)), digest, signed)
    assert all_of(pin, by_key).needs_signatures
    assert not any_of(pin, wrong_pin).needs_signatures


def test_a_refusal_by_a_composed_policy_names_all_of_it(digest, signed, other_key):
    wanted = trusted_keys(other_key.public)
    error = refusal(all_of(any_of(pinned(OTHER)), wanted), digest, signed)
    assert error.expected == f"(digest {OTHER}) and (a signature by key {other_key.public.key_id})"
    assert error.remedy == f"{PIN}; or {UNTRUSTED}"
    error = refusal(any_of(pinned(OTHER), wanted), digest, None)
    assert error.expected == f"(digest {OTHER}) or (a signature by key {other_key.public.key_id})"


@pytest.mark.parametrize(
    ("make", "what"),
    [(pinned, "digest"), (trusted_keys, "public key"), (any_of, "policy"), (all_of, "policy")],
)
def test_an_empty_policy_is_an_error_when_it_is_made(make, what):
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == (
        f"{make.__name__}() without a {what} is no policy\n  what to do: give at least one {what}"
    )


@pytest.mark.parametrize("digest", ["", "sha256:" + OTHER, OTHER[1:], "A" * 64, OTHER + "\n", 3])
def test_what_is_no_digest_cannot_be_pinned(digest):
    with pytest.raises(InputError, match="that is not the digest of a package"):
        pinned(OTHER, digest)


@pytest.mark.parametrize("make", [any_of, all_of])
def test_what_is_no_policy_cannot_be_composed(make):
    with pytest.raises(InputError, match=r"takes policies\n  found: str$"):
        make(pinned(OTHER), OTHER)


def test_policies_cannot_be_changed_and_are_equal_by_what_they_ask(key):
    policy = trusted_keys(key.public)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.threshold = 0
    assert policy == trusted_keys(key.public.to_pem())
    assert {pinned(OTHER), pinned(OTHER, OTHER)} == {pinned(OTHER)}


def test_the_bypass_accepts_and_warns_exactly_once_in_a_process():
    done = subprocess.run([sys.executable, "-c", ANYTHING], capture_output=True, text=True, check=True)
    said = "UserWarning: unsafe_accept_anything() is in use: packages are accepted whoever made them"
    assert done.stderr.count(said) == 1
    assert done.stderr.count("Warning") == 1


def test_making_the_bypass_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(unsafe_accept_anything()) == "anything"


def test_the_environment_lists_key_files(tmp_path, monkeypatch, digest, signed, key, other_key):
    files = [str(tmp_path / "b.key.pub"), "", str(tmp_path / "a.key.pub")]
    monkeypatch.setenv("AOTPACK_TRUSTED_KEYS", os.pathsep.join(files))
    policy = policy_from_environment()
    assert policy == trusted_keys(other_key.public, key.public)
    assert accepts(policy, digest, signed)


def test_an_environment_that_says_nothing_gives_no_policy(monkeypatch):
    monkeypatch.delenv("AOTPACK_TRUSTED_KEYS", raising=False)
    assert policy_from_environment() is None


@pytest.mark.parametrize("value", ["", ":", "::"])
def test_an_environment_that_lists_no_key_is_an_error(value, monkeypatch):
    monkeypatch.setenv("AOTPACK_TRUSTED_KEYS", value)
    with pytest.raises(InputError) as caught:
        policy_from_environment()
    assert str(caught.value) == (
        "AOTPACK_TRUSTED_KEYS is set and lists no key\n"
        "  what to do: list public key files in it, with : between them, or unset it"
    )


@pytest.mark.parametrize("value", ["/nowhere.pub", "4e" * 32])
def test_an_environment_that_lists_no_key_file_is_an_error(value, monkeypatch):
    monkeypatch.setenv("AOTPACK_TRUSTED_KEYS", value)
    with pytest.raises(InputError, match="there is no public key at"):
        policy_from_environment()


def test_a_pin_and_a_missing_signature_need_no_cryptography(digest):
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from aotpack.trust import *\nfrom aotpack.errors import TrustError\n"
        f"pinned({digest!r}).check('x', {digest!r}, None)\n"
        f"try:\n    trusted_keys('4e' * 32).check('x', {digest!r}, None)\n"
        "except TrustError as error:\n    print(error.problem)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "x is not trusted\n"


def test_keys_may_be_files_text_or_objects(tmp_path, key):
    path = tmp_path / "a.key.pub"
    sources = (path, str(path), path.read_text(), key.public.raw.hex(), key.public)
    assert {trusted_keys(source) for source in sources} == {trusted_keys(PublicKey.parse(path))}
