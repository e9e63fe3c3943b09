"""Which variant of each spec runs on a machine: a pure function of a manifest and facts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aotpack.errors import HostError
from aotpack.package.manifest import Manifest, Variant
from aotpack.targets import HostFacts, choose

__all__ = ["CALLING_CONVENTIONS", "choose_variants", "needed_names"]

# By device type; build/pipeline.py says what each version changed. What the runtime makes of a torch
# BlockMask has the tiles of version 2, so CPU programs of version 1 are refused.
CALLING_CONVENTIONS: Final[Mapping[str, tuple[int, ...]]] = {"cpu": (2,), "cuda": (1, 2)}


def choose_variants(manifest: Manifest, host: HostFacts, device: str) -> dict[str, Variant]:
    """The variant of each spec, by the spec's digest.

    Raises:
        NoVariantError, HostError: some spec has none that runs there.
    """
    device_type = device.partition(":")[0]
    # Of a device type that there is not, choose() says so.
    known = CALLING_CONVENTIONS.get(device_type, (manifest.calling_convention,))
    if manifest.calling_convention not in known:
        raise HostError(
            f"the package uses a calling convention that this aotpack does not know on {device_type}",
            expected=" or ".join(map(str, known)),
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
