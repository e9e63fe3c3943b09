"""Who made a package: keys, detached signatures and policies. FORMAT.md has the signature file."""

from aotpack.trust.keys import PrivateKey, PublicKey, generate_key_pair, read_private_key
from aotpack.trust.policy import (
    TrustPolicy,
    all_of,
    any_of,
    pinned,
    policy_from_environment,
    trusted_keys,
    unsafe_accept_anything,
)
from aotpack.trust.signature import (
    MAX_SIGNATURE_FILE,
    SIGNATURE_SUFFIX,
    Signature,
    Signatures,
    parse_signatures,
    read_signatures,
    sign,
    signature_path,
)

__all__ = [
    "MAX_SIGNATURE_FILE",
    "SIGNATURE_SUFFIX",
    "PrivateKey",
    "PublicKey",
    "Signature",
    "Signatures",
    "TrustPolicy",
    "all_of",
    "any_of",
    "generate_key_pair",
    "parse_signatures",
    "pinned",
    "policy_from_environment",
    "read_private_key",
    "read_signatures",
    "sign",
    "signature_path",
    "trusted_keys",
    "unsafe_accept_anything",
]
