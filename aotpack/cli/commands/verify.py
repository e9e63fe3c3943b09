"""``aotpack verify``: hash everything in a package, and ask who signed it. Needs no torch."""

from __future__ import annotations

from typing import Any

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.places import offline_option, opened
from aotpack.cli.text import fields, size
from aotpack.errors import HostError, TrustError
from aotpack.store import Store
from aotpack.store.signatures import signatures_of
from aotpack.trust import (
    SIGNATURE_SUFFIX,
    Signature,
    Signatures,
    TrustPolicy,
    all_of,
    pinned,
    policy_from_environment,
    trusted_keys,
)

__all__ = ["verify"]


@click.command()
@click.argument("file")
@offline_option
@click.option(
    "--key",
    "keys",
    metavar="PUB",
    multiple=True,
    help="A public key to trust, as a file or hex digits; one of several must have signed.",
)
@click.option(
    "--digest", "digests", metavar="HEX", multiple=True, help="The digest it must have; one of several."
)
@talking
def verify(
    console: Console, file: str, offline: bool, keys: tuple[str, ...], digests: tuple[str, ...]
) -> None:
    """Check every byte of a package against its hashes, then who signed it. FILE may be a URL.

    With --key and --digest both must be right. With neither, a signature by one of the keys that
    AOTPACK_TRUSTED_KEYS lists must be there, where that is set.
    """
    policy = _policy(keys, digests)
    with opened(file, offline) as package:
        package.check_blobs()
        blobs, digest, name = package.manifest.blobs, package.digest, package.name
    raw = sum(blob.raw_size for blob in blobs.values())
    found = signatures_of(file, digest, Store(), offline=offline or None)
    signatures = _signatures(name, digest, found, policy)
    data = {
        "path": name,
        "digest": digest,
        "blobs": len(blobs),
        "raw_bytes": raw,
        "signatures": signatures,
        "policy": None if policy is None else str(policy),
        "trusted": None if policy is None else True,
    }
    head = f"{name}: {len(blobs)} blobs, {size(raw)} unpacked, all as the manifest says"
    console.show("aotpack.verify/1", data, f"{head}\n{fields(_rows(data))}")


def _policy(keys: tuple[str, ...], digests: tuple[str, ...]) -> TrustPolicy | None:
    policies = [pinned(*digests)] if digests else []
    policies += [trusted_keys(*keys)] if keys else []
    return all_of(*policies) if policies else policy_from_environment()


def _signatures(
    name: str, digest: str, found: Signatures | None, policy: TrustPolicy | None
) -> list[dict[str, Any]]:
    """Whose signatures are there, after the policy has accepted them."""
    if policy is not None:
        policy.check(name, digest, found)
    if found is None:
        return []
    rows = [{"key_id": each.key_id, "valid": _valid(each, digest)} for each in found.signatures]
    if found.digest != digest or (policy is None and any(row["valid"] is False for row in rows)):
        raise TrustError(
            f"{name}{SIGNATURE_SUFFIX} does not sign {name}",
            expected=f"signatures of digest {digest}",
            found=_defect(found.digest, digest, rows),
            remedy="fetch both again, or delete the signature file and sign again",
        )
    return rows


def _defect(signed: str, digest: str, rows: list[dict[str, Any]]) -> str:
    if signed != digest:
        return f"signatures of digest {signed}"
    return f"one that does not verify, by key {', '.join(r['key_id'] for r in rows if r['valid'] is False)}"


def _valid(signature: Signature, digest: str) -> bool | None:
    try:
        return signature.verifies(digest)
    except HostError:
        # Without cryptography: what was asked for was checked by then, and the rest is reported as it is.
        return None


def _rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    words = {True: "", False: ", which does not verify", None: ", not checked: pip install 'aotpack[sign]'"}
    rows = [("digest", data["digest"])]
    rows += [("signed by", f"{row['key_id']}{words[row['valid']]}") for row in data["signatures"]]
    rows += [] if data["signatures"] else [("signed by", "nobody")]
    if data["policy"] is not None:
        return [*rows, ("trusted", f"yes: {data['policy']}")]
    return [*rows, ("trusted", "nothing says so: name keys or a digest (--key, --digest)")]
