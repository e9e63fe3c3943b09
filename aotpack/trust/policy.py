"""Whom to trust: policies that accept a package by its digest or by who signed it."""

from __future__ import annotations

import abc
import os
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aotpack.errors import InputError, TrustError
from aotpack.trust.keys import PublicKey
from aotpack.trust.signature import Signatures, check_digest

__all__ = [
    "TrustPolicy",
    "all_of",
    "any_of",
    "pinned",
    "policy_from_environment",
    "trusted_keys",
    "unsafe_accept_anything",
]

_VARIABLE: Final = "AOTPACK_TRUSTED_KEYS"
_FETCH: Final = "fetch the package and its .sig again from where you trust"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Evidence:
    """What is known of a package.

    Attributes:
        digest: the package's.
        found: all of this in words.
        defect: why nothing else counts, if something is wrong with the signatures.
        key_ids: of all keys that are said to have signed it.
        valid: trusted keys whose signature was verified.
    """

    digest: str
    found: str
    defect: str | None = None
    key_ids: frozenset[str] = frozenset()
    valid: frozenset[PublicKey] = frozenset()


class TrustPolicy(abc.ABC):
    """Accepts or refuses packages; str() says what it asks for.

    Immutable. The functions of this module make policies.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def keys(self) -> frozenset[PublicKey]:
        """The keys that are trusted somewhere in the policy."""

    @property
    def needs_signatures(self) -> bool:
        """Whether ``check`` looks at signatures; where not, nobody need fetch them."""
        return bool(self.keys)

    def check(self, name: str, digest: str, signatures: Signatures | None) -> None:
        """Return if the package is trusted.

        A key that is in the signature file counts only where the policy trusts it. Signatures of another
        package, and a signature by a trusted key that does not verify, are refused whatever else is right.

        Args:
            name: of the package, for messages.
            digest: of the package as it was read; its bytes must have been checked against it, or be so when
                they are used.
            signatures: those that came with it, None where there are none.

        Raises:
            TrustError: the package is not trusted.
            HostError: a signature must be verified and the extra ``sign`` is not installed.
        """
        evidence = _examine(digest, signatures, self.keys)
        remedies = (_FETCH,) if evidence.defect else self._refusals(evidence)
        if remedies:
            raise TrustError(
                f"{name} is not trusted" + (f": {evidence.defect}" if evidence.defect else ""),
                expected=str(self),
                found=evidence.found,
                remedy="; or ".join(dict.fromkeys(remedies)),
            )

    @abc.abstractmethod
    def _refusals(self, evidence: _Evidence) -> tuple[str, ...]:
        """What the user can do about each reason to refuse; none means that the package is accepted."""


def pinned(*digests: str) -> TrustPolicy:
    """Accepts the packages with these digests, signed or not.

    Raises:
        InputError: no digest, or something else.
    """
    if not digests:
        raise _empty("pinned()", "digest")
    return _Pinned(digests=tuple(dict.fromkeys(check_digest(digest) for digest in digests)))


def trusted_keys(*keys: PublicKey | str | os.PathLike[str], threshold: int = 1) -> TrustPolicy:
    """Accepts packages that enough of these keys have signed.

    Args:
        keys: public keys, or what ``PublicKey.parse`` takes: files, PEM text or hex digits.
        threshold: how many different ones of them must have signed.

    Raises:
        InputError: no key, what is not one, or a threshold that cannot be reached.
    """
    if not keys:
        raise _empty("trusted_keys()", "public key")
    parsed = tuple(dict.fromkeys(key if isinstance(key, PublicKey) else PublicKey.parse(key) for key in keys))
    if not isinstance(threshold, int) or isinstance(threshold, bool) or not 1 <= threshold <= len(parsed):
        raise InputError(
            "the threshold of trusted_keys() is wrong",
            expected=f"an integer from 1 to {len(parsed)}, the number of different keys",
            found=repr(threshold),
        )
    return _TrustedKeys(trusted=parsed, threshold=threshold)


def any_of(*policies: TrustPolicy) -> TrustPolicy:
    """Accepts what at least one of the policies accepts.

    Raises:
        InputError: no policy, or something else.
    """
    return _AnyOf(policies=_policies("any_of()", policies))


def all_of(*policies: TrustPolicy) -> TrustPolicy:
    """Accepts what all of the policies accept.

    Raises:
        InputError: no policy, or something else.
    """
    return _AllOf(policies=_policies("all_of()", policies))


def unsafe_accept_anything() -> TrustPolicy:
    """Accepts every package, whoever made it, and warns about that once in a process."""
    return _Anything()


def policy_from_environment() -> TrustPolicy | None:
    """A signature by any key of the files that AOTPACK_TRUSTED_KEYS lists, as PATH lists folders.

    None where the variable is not set.

    Raises:
        InputError: the variable lists no file, or one that is not a public key.
    """
    listed = os.environ.get(_VARIABLE)
    if listed is None:
        return None
    paths = [Path(part) for part in listed.split(os.pathsep) if part]
    if not paths:
        # Not the same as no policy: a script whose own variable was empty must not switch the check off.
        remedy = f"list public key files in it, with {os.pathsep} between them, or unset it"
        raise InputError(f"{_VARIABLE} is set and lists no key", remedy=remedy)
    return trusted_keys(*paths)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pinned(TrustPolicy):
    digests: tuple[str, ...]

    @property
    def keys(self) -> frozenset[PublicKey]:
        return frozenset()

    def __str__(self) -> str:
        return f"digest {' or '.join(self.digests)}"

    def _refusals(self, evidence: _Evidence) -> tuple[str, ...]:
        if evidence.digest in self.digests:
            return ()
        return ("fetch the package that was pinned, or pin this one if you know where it is from",)


@dataclass(frozen=True, kw_only=True, slots=True)
class _TrustedKeys(TrustPolicy):
    trusted: tuple[PublicKey, ...]
    threshold: int

    @property
    def keys(self) -> frozenset[PublicKey]:
        return frozenset(self.trusted)

    def __str__(self) -> str:
        ids = [key.key_id for key in self.trusted]
        if self.threshold == 1:
            return f"a signature by key {' or '.join(ids)}"
        return f"signatures by {self.threshold} of the keys {', '.join(ids)}"

    def _refusals(self, evidence: _Evidence) -> tuple[str, ...]:
        if len(evidence.valid & self.keys) >= self.threshold:
            return ()
        if not evidence.key_ids:
            return ("fetch its .sig too, or have it signed: aotpack sign FILE --key KEY",)
        if any(key.raw.hex() in evidence.key_ids for key in self.trusted):
            return ("give the public key itself: what was given is the id of one",)
        return ("have it signed by a trusted key, or trust the key that signed it if you know whose it is",)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Composed(TrustPolicy):
    policies: tuple[TrustPolicy, ...]

    @property
    def keys(self) -> frozenset[PublicKey]:
        return frozenset().union(*(policy.keys for policy in self.policies))

    def _joined(self, word: str) -> str:
        if len(self.policies) == 1:
            return str(self.policies[0])
        return f" {word} ".join(f"({policy})" for policy in self.policies)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AnyOf(_Composed):
    def __str__(self) -> str:
        return self._joined("or")

    def _refusals(self, evidence: _Evidence) -> tuple[str, ...]:
        each = [policy._refusals(evidence) for policy in self.policies]
        return () if () in each else tuple(remedy for remedies in each for remedy in remedies)


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllOf(_Composed):
    def __str__(self) -> str:
        return self._joined("and")

    def _refusals(self, evidence: _Evidence) -> tuple[str, ...]:
        return tuple(remedy for policy in self.policies for remedy in policy._refusals(evidence))


_UNWARNED: Final = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Anything(TrustPolicy):
    @property
    def keys(self) -> frozenset[PublicKey]:
        return frozenset()

    def __str__(self) -> str:
        return "anything"

    def _refusals(self, evidence: _Evidence) -> tuple[str, ...]:
        # Taken once and never given back: of many threads that check at once, one warns.
        if _UNWARNED.acquire(blocking=False):
            text = "unsafe_accept_anything() is in use: packages are accepted whoever made them"
            warnings.warn(text, stacklevel=3)
        return ()


def _examine(digest: str, signatures: Signatures | None, trusted: frozenset[PublicKey]) -> _Evidence:
    found = f"digest {digest}"
    if not trusted:
        return _Evidence(digest=digest, found=found)
    if signatures is None:
        return _Evidence(digest=digest, found=f"{found}, not signed")
    if signatures.digest != digest:
        return _Evidence(
            digest=digest,
            found=f"{found}, signatures of digest {signatures.digest}",
            defect="its signature file is one of another package",
        )
    return _verify(digest, signatures, trusted)


def _verify(digest: str, signatures: Signatures, trusted: frozenset[PublicKey]) -> _Evidence:
    words: list[str] = []
    valid: set[PublicKey] = set()
    defect: str | None = None
    for signature in signatures.signatures:
        if signature.public_key not in trusted:
            words.append(f"{signature.key_id} (not trusted)")
        elif signature.verifies(digest):
            words.append(f"{signature.key_id} (valid)")
            valid.add(signature.public_key)
        else:
            words.append(f"{signature.key_id} (does not verify)")
            defect = "a signature of a trusted key does not verify"
    return _Evidence(
        digest=digest,
        found=f"digest {digest}, signed by key {', '.join(words)}",
        defect=defect,
        key_ids=frozenset(signature.key_id for signature in signatures.signatures),
        valid=frozenset(valid),
    )


def _policies(function: str, policies: tuple[TrustPolicy, ...]) -> tuple[TrustPolicy, ...]:
    if not policies:
        raise _empty(function, "policy")
    for policy in policies:
        if not isinstance(policy, TrustPolicy):
            raise InputError(f"{function} takes policies", found=type(policy).__name__)
    return policies


def _empty(function: str, what: str) -> InputError:
    problem = f"{function} without a {what} is no policy"
    return InputError(problem, remedy=f"give at least one {what}")
