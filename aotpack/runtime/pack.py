"""A loaded package on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch

from aotpack.errors import InputError, MismatchError
from aotpack.own import resolve
from aotpack.package import Variant
from aotpack.runtime.attention import Attention
from aotpack.runtime.origin import Origin, reload_pack
from aotpack.runtime.stats import PackStats
from aotpack.spec import AttentionSpec, differences

__all__ = ["Pack", "Wanted", "require_specs"]

Wanted = AttentionSpec | Mapping[str, AttentionSpec] | Iterable[AttentionSpec]


class Pack:
    """A loaded package on one device. Keep it as long as its attentions are used.

    A copy is the pack itself. A pickle names the package by its digest, as an attention's does.

    Attributes:
        path: where it was loaded from.
        digest: SHA-256 of its manifest.
        device: where its attentions run.
        target: the target of the variants that were chosen; None for the eager fallback.
        specs: by the name under which ``attention`` finds them.
    """

    def __init__(
        self,
        path: str,
        origin: Origin,
        device: torch.device,
        chosen: Mapping[str, Variant],
        attentions: Mapping[str, Attention],
        load_s: float,
    ) -> None:
        self.path = path
        self.digest = origin.digest
        self.device = device
        self.target = next((variant.target for variant in chosen.values()), None)
        self.specs: Mapping[str, AttentionSpec] = dict(origin.specs)
        self._origin = origin
        self._attentions = dict(attentions)
        self._load_s = load_s
        code = {key for variant in chosen.values() for key in variant.code}
        blobs = {} if origin.manifest is None else origin.manifest.blobs
        self._bytes = sum(blobs[key].raw_size for key in code)

    def __repr__(self) -> str:
        return (
            f"<aotpack pack {self.path}: {', '.join(self.specs)} on {self.device} ({self.target or 'eager'})>"
        )

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Pack], tuple[Any, ...]]:
        return reload_pack, (self._origin.state(),)

    def stats(self) -> PackStats:
        """What was loaded, and how often it was called up to now; cheap, from any thread."""
        return PackStats(
            path=self.path,
            digest=self.digest,
            device=str(self.device),
            target=self.target,
            load_s=self._load_s,
            bytes=self._bytes,
            attentions={name: attend.stats() for name, attend in self._attentions.items()},
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
        require_specs(self.specs, specs)


def require_specs(found: Mapping[str, AttentionSpec], wanted: Wanted) -> None:
    """Raises ``MismatchError`` where something that is wanted was not found, as ``Pack.require`` has it."""
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
