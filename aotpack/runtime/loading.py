"""``aotpack.load``: from a package file to attentions that are ready to be called."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import torch

from aotpack.errors import (
    AotpackError,
    HostError,
    InputError,
    IntegrityError,
    NoVariantError,
    OfflineError,
)
from aotpack.lockfile import Lockfile, find_lockfile
from aotpack.package import Manifest, Package, Variant
from aotpack.package.choosing import choose_variants, needed_names
from aotpack.runtime.attention import Attention
from aotpack.runtime.host import host_facts
from aotpack.runtime.log import configure, log
from aotpack.runtime.origin import Origin
from aotpack.runtime.pack import Pack, Wanted, require_specs
from aotpack.runtime.programs import CompiledPrograms
from aotpack.runtime.warmup import warm_up
from aotpack.store import Places, Store, is_url, open_kept, open_package

if TYPE_CHECKING:
    from aotpack.trust import TrustPolicy

__all__ = ["Pack", "load", "load_again", "variants_here"]

TRUSTED_KEYS: Final = "AOTPACK_TRUSTED_KEYS"


def load(
    source: Places,
    device: str | torch.device = "cpu",
    *,
    specs: Wanted | None = None,
    on_miss: Literal["error", "eager"] = "error",
    trust: TrustPolicy | None = None,
    lock: str | os.PathLike[str] | None = None,
    offline: bool | None = None,
) -> Pack:
    """Loads a package for one device; nothing is traced or compiled, now or later.

    Of a package behind a URL, the index and the variant that runs here are read, and kept in the store: a
    later load reads 48 bytes to see that the package is still the same.

    Args:
        source: a package file, a folder that holds one, a URL (``s3://``, ``https://``, ``hf://``, ...), or a
            list of such places that hold copies of one package, in the order in which they are tried; or a
            name in the lock.
        device: ``"cpu"``, ``"cuda"`` (the current device) or ``"cuda:N"``.
        specs: what the trainer needs, as in ``Pack.require``.
        on_miss: ``"eager"`` falls back to dense math, with one warning, where no variant runs here.
        trust: who must have made the package (``aotpack.trust``); by default one of the keys that
            ``AOTPACK_TRUSTED_KEYS`` names, or nobody where it is not set.
        lock: a lock file; by default ``$AOTPACK_LOCK``, or ``aotpack.lock`` in this folder. Where there is
            one, no other package is taken than those it names.
        offline: load a URL from the store without any network call; by default what ``AOTPACK_OFFLINE`` says.

    Raises:
        InputError: there is no such file, or the device is unknown.
        MismatchError: the package was built for other specs.
        NoVariantError, HostError: no variant runs here; every variant and the reason is listed.
        HostError: a URL cannot be reached or read.
        IntegrityError: the file is not what its manifest says, replicas hold different packages, or it is
            not the one that is locked.
        TrustError: the policy does not accept the package.
        OfflineError: offline, and the store does not hold what is needed.
    """
    configure()
    start = time.perf_counter()
    where = _device(device)
    if on_miss not in ("error", "eager"):
        raise InputError("on_miss is wrong", expected="'error' or 'eager'", found=repr(on_miss))
    store, locked = Store(), find_lockfile(lock)
    name, places = _resolve(source, locked)
    with open_package(places, store, offline=offline) as package:
        if locked is not None:
            locked.check(package.name, package.digest, name)
        if trust is not None or TRUSTED_KEYS in os.environ:
            _trust(package, places, store, trust, offline)
        if specs is not None:
            require_specs(package.manifest.specs, specs)
        found = {"digest": package.digest, "size": package.size, "manifest": package.manifest}
        origin = Origin.of(places, device=str(where), on_miss=on_miss, **found)
        return _ready(package, origin, store, start, at_hand=not is_url(package.name))


def load_again(origin: Origin) -> Pack:
    """Loads the package with the digest of an origin, from its places or else from the store alone.

    Raises:
        AotpackError: as ``load``; where neither has it, what each said.
    """
    policy = _pinned(origin.digest)
    try:
        return load(origin.places, origin.device, on_miss=_on_miss(origin.on_miss), trust=policy)
    except (InputError, HostError, IntegrityError, OfflineError) as error:
        failure = error
    start, store = time.perf_counter(), Store()
    try:
        with open_kept(origin.digest, origin.size, store) as package:
            _trust(package, origin.places, store, policy, offline=True)
            origin = replace(origin, manifest=package.manifest)
            return _ready(package, origin, store, start, at_hand=False)
    except OfflineError as error:
        raise HostError(
            f"the package {origin.digest} of a pickled attention is not there any more",
            expected=f"it in {' or '.join(origin.places)}, or in the store {store.root}",
            found=f"{failure.problem}; {error.problem}",
            remedy="put that package back, or load another one and set the module's attention anew",
        ) from failure


def variants_here(manifest: Manifest, device: str) -> dict[str, Variant]:
    """The variant of each spec, by its digest, for a device of this machine.

    Raises:
        NoVariantError, HostError: some spec has none that runs here.
    """
    symbols, libraries = needed_names(manifest)
    return choose_variants(manifest, host_facts(symbols=symbols, libraries=libraries), device)


def _pinned(digest: str) -> TrustPolicy:
    """That package, by whom the environment trusts."""
    from aotpack.trust import all_of, pinned, policy_from_environment

    keys = policy_from_environment() if TRUSTED_KEYS in os.environ else None
    return pinned(digest) if keys is None else all_of(pinned(digest), keys)


def _trust(
    package: Package, places: Places, store: Store, trust: TrustPolicy | None, offline: bool | None
) -> None:
    # Imported here: most loads have no policy.
    from aotpack.store.signatures import signatures_of
    from aotpack.trust import policy_from_environment

    policy = trust or policy_from_environment()
    if policy is not None:
        signed = policy.needs_signatures
        signatures = signatures_of(places, package.digest, store, offline=offline) if signed else None
        policy.check(package.name, package.digest, signatures)


def _resolve(source: Places, locked: Lockfile | None) -> tuple[str | None, Places]:
    """The name under which a source is locked, if it is a name, and where it is."""
    if locked is not None and isinstance(source, str) and (found := locked.sources(source)) is not None:
        return source, found
    return None, source


def _ready(package: Package, origin: Origin, store: Store, start: float, *, at_hand: bool) -> Pack:
    """The pack of a package that may be used; ``at_hand`` says whether its frames can be read at no cost."""
    where, manifest = torch.device(origin.device), package.manifest
    miss = (NoVariantError, HostError) if origin.on_miss == "eager" else ()
    chosen: dict[str, Variant] = {}
    try:
        chosen = variants_here(manifest, origin.device)
    except miss as error:
        attentions = _eager(origin, where, error)
    else:
        # Outside: a package that cannot be fetched or unpacked is no reason to train slowly.
        folders = _unpack(package, chosen, store, at_hand)
        try:
            attentions = _compiled(origin, chosen, folders, where)
        except miss as error:
            chosen, attentions = {}, _eager(origin, where, error)
    pack = Pack(package.name, origin, where, chosen, attentions, time.perf_counter() - start)
    log.info("loaded %r, digest %s, in %.0f ms", pack, pack.digest, 1e3 * (time.perf_counter() - start))
    return pack


def _unpack(package: Package, chosen: Mapping[str, Variant], store: Store, at_hand: bool) -> dict[str, Path]:
    if at_hand:
        # The store may hold a sound copy already; a file that is damaged is refused all the same.
        package.check_frames(key for variant in chosen.values() for key in variant.code)
    folders = {digest: store.unpack(package, variant) for digest, variant in chosen.items()}
    for digest, folder in folders.items():
        log.debug("spec %s: variant %s in %s", digest, chosen[digest].target, folder)
    return folders


def _compiled(
    origin: Origin, chosen: Mapping[str, Variant], folders: Mapping[str, Path], device: torch.device
) -> dict[str, Attention]:
    programs = {
        digest: CompiledPrograms(variant, folders[digest], device) for digest, variant in chosen.items()
    }
    specs = origin.specs
    if device.type == "cuda":
        for spec in {spec.digest: spec for spec in specs.values()}.values():
            # Not one that is handed out: what it does is no call of anybody's.
            warm_up(Attention("", spec, device, programs[spec.digest]), programs[spec.digest])
    return {
        name: Attention(name, spec, device, programs[spec.digest].counted_for(name), origin)
        for name, spec in specs.items()
    }


def _eager(origin: Origin, device: torch.device, reason: AotpackError) -> dict[str, Attention]:
    warnings.warn(f"aotpack runs dense eager attention: {reason}", stacklevel=4)
    return {name: Attention(name, spec, device, None, origin) for name, spec in origin.specs.items()}


def _on_miss(said: str) -> Literal["error", "eager"]:
    return "eager" if said == "eager" else "error"


def _device(device: str | torch.device) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise InputError(
            "the device is unknown", expected="cpu, cuda or cuda:N", found=repr(device)
        ) from error
    if where.type not in ("cpu", "cuda"):
        raise InputError("the device is not supported", expected="cpu, cuda or cuda:N", found=str(where))
    if where.type == "cpu":
        return torch.device("cpu")
    if ":" not in str(where) and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return where
