"""Which variant of each spec runs on a machine: a pure function of a manifest and facts."""

from __future__ import annotations

from typing import Final

from aotpack.errors import HostError
from aotpack.package.manifest import Manifest, Variant
from aotpack.targets import HostFacts, choose

__all__ = ["CALLING_CONVENTIONS", "choose_variants", "needed_names"]

CALLING_CONVENTIONS: Final = (1,)


def choose_variants(manifest: Manifest, host: HostFacts, device: str) -> dict[str, Variant]:
    """The variant of each spec, by the spec's digest.

    Raises:
        NoVariantError, HostError: some spec has none that runs there.
    """
    if manifest.calling_convention not in CALLING_CONVENTIONS:
        raise HostError(
            "the package uses a calling convention that this aotpack does not know",
            expected=" or ".join(map(str, CALLING_CONVENTIONS)),
            found=manifest.calling_convention,
            remedy="install a newer aotpack, or build the package again with this one",
        )
    return {
        spec.digest: choose([v for v in manifest.variants if v.spec == spec.digest], host, device).variant
        for spec in manifest.specs.values()
    }


def needed_names(manifest: Manifest) -> tuple[set[str], set[str]]:
    """The torch symbols and the libraries that some variant needs: what a host is asked for."""
    needs = [variant.requires for variant in manifest.variants]
    return {s for need in needs for s in need.torch_symbols}, {n for need in needs for n in need.needed}
