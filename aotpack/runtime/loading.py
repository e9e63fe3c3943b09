"""``aotpack.load``: from a package file to attentions that are ready to be called."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import torch

from aotpack.errors import AotpackError, HostError, InputError, MismatchError, NoVariantError
from aotpack.lockfile import Lockfile, find_lockfile
from aotpack.own import resolve
from aotpack.package import Manifest, Package, Variant
from aotpack.package.choosing import choose_variants, needed_names
from aotpack.runtime.attention import Attention
from aotpack.runtime.host import host_facts
from aotpack.runtime.programs import CompiledPrograms
from aotpack.runtime.warmup import warm_up
from aotpack.spec import AttentionSpec, differences
from aotpack.store import Places, Store, is_url, open_package

if TYPE_CHECKING:
    from aotpack.trust import TrustPolicy

__all__ = ["Pack", "load", "variants_here"]

TRUSTED_KEYS: Final = "AOTPACK_TRUSTED_KEYS"
Wanted = AttentionSpec | Mapping[str, AttentionSpec] | Iterable[AttentionSpec]


class Pack:
    """A loaded package on one device. Keep it as long as its attentions are used.

    Attributes:
        path: where it was loaded from.
        digest: SHA-256 of its manifest.
        device: where its attentions run.
        target: the target of the variants that were chosen; None for the eager fallback.
        specs: by the name under which ``attention`` finds them.
    """

    def __init__(
        self, package: Package, device: torch.device, target: str | None, attentions: Mapping[str, Attention]
    ) -> None:
        self.path = package.name
        self.digest = package.digest
        self.device = device
        self.target = target
        self.specs: Mapping[str, AttentionSpec] = dict(package.manifest.specs)
        self._attentions = dict(attentions)

    def __repr__(self) -> str:
        return (
            f"<aotpack pack {self.path}: {', '.join(self.specs)} on {self.device} ({self.target or 'eager'})>"
        )

    def attention(self, name: str | None = None) -> Attention:
        """The attention of that name; without a name, the only one.

        Raises:
            InputError: there is none, or more than one and no name.
        """
        if name is None and len(self._attentions) == 1:
            return next(iter(self._attentions.values()))
        if name not in self._attentions:
            raise InputError(
                "the package has no attention of that name" if name else "the package has several attentions",
                expected=" or ".join(repr(known) for known in self._attentions),
                found=repr(name),
                remedy="ask for a listed name",
            )
        return self._attentions[name]

    def require(self, specs: Wanted) -> None:
        """Refuses a package that was built for another model.

        Args:
            specs: one spec or several, or a mapping of names to specs. A rule of your own is imported where
                its spec has no source digest yet.

        Raises:
            MismatchError: a spec is not in the package; the fields that differ are listed.
            SpecError: a rule of your own cannot be imported or used.
        """
        _require(self.specs, specs)


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
            _require(package.manifest.specs, specs)
        miss = (NoVariantError, HostError) if on_miss == "eager" else ()
        try:
            chosen = variants_here(package.manifest, str(where))
        except miss as error:
            return _eager(package, where, error)
        # Outside: a package that cannot be fetched or unpacked is no reason to train slowly.
        folders = _unpack(package, chosen, store)
        try:
            attentions = _attentions(package.manifest, chosen, folders, where)
        except miss as error:
            return _eager(package, where, error)
        return Pack(package, where, next(iter(chosen.values())).target, attentions)


def variants_here(manifest: Manifest, device: str) -> dict[str, Variant]:
    """The variant of each spec, by its digest, for a device of this machine.

    Raises:
        NoVariantError, HostError: some spec has none that runs here.
    """
    symbols, libraries = needed_names(manifest)
    return choose_variants(manifest, host_facts(symbols=symbols, libraries=libraries), device)


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


def _unpack(package: Package, chosen: Mapping[str, Variant], store: Store) -> dict[str, Path]:
    if not is_url(package.name):
        # The store may hold a sound copy already; a file that is damaged is refused all the same.
        package.check_frames(key for variant in chosen.values() for key in variant.code)
    return {digest: store.unpack(package, variant) for digest, variant in chosen.items()}


def _attentions(
    manifest: Manifest, chosen: Mapping[str, Variant], folders: Mapping[str, Path], device: torch.device
) -> dict[str, Attention]:
    programs = {
        digest: CompiledPrograms(variant, folders[digest], device) for digest, variant in chosen.items()
    }
    attentions = {
        name: Attention(name, spec, device, programs[spec.digest]) for name, spec in manifest.specs.items()
    }
    if device.type == "cuda":
        for attend in {a.spec.digest: a for a in attentions.values()}.values():
            warm_up(attend, programs[attend.spec.digest])
    return attentions


def _eager(package: Package, device: torch.device, reason: AotpackError) -> Pack:
    warnings.warn(f"aotpack runs dense eager attention: {reason}", stacklevel=3)
    specs = package.manifest.specs.items()
    return Pack(package, device, None, {name: Attention(name, spec, device, None) for name, spec in specs})


def _require(found: Mapping[str, AttentionSpec], wanted: Wanted) -> None:
    if isinstance(wanted, AttentionSpec):
        wanted = [wanted]
    named = wanted.items() if isinstance(wanted, Mapping) else ((None, spec) for spec in wanted)
    for name, given in named:
        spec = resolve(given, anew=False)
        if found.get(name) == spec if name is not None else spec in found.values():
            continue
        nearest = _nearest(found, name, spec)
        lines = differences(spec, found[nearest])
        raise MismatchError(
            f"the package was built for another {'attention' if name is None else f'attention {name!r}'}",
            expected=spec.to_json(),
            found=f"{nearest!r}, which differs in\n    " + "\n    ".join(lines)
            if lines
            else f"the same spec under the name {nearest!r}",
            remedy="load the package of this model, or build one with 'aotpack build'",
        )


def _nearest(found: Mapping[str, AttentionSpec], name: str | None, spec: AttentionSpec) -> str:
    if name in found:
        return str(name)
    return min(found, key=lambda known: len(differences(spec, found[known])))


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
