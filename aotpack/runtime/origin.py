"""Where an attention came from: how a copy of it, in this process or another, finds its package again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from aotpack.errors import InputError
from aotpack.package import Manifest
from aotpack.spec import AttentionSpec
from aotpack.store import Places, Store, is_url, keep_front, shown

if TYPE_CHECKING:
    from aotpack.runtime.attention import Attention
    from aotpack.runtime.loading import Pack

__all__ = ["Origin", "reload_attention", "reload_pack"]

_FIELDS: Final = {"places": list, "digest": str, "size": int, "device": str, "on_miss": str}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What ``load`` was asked for, without secrets, and what it found.

    Attributes:
        places: absolute paths, and URLs without user, password and query.
        digest: of the package.
        size: of the package, in bytes.
        device: where it was loaded.
        on_miss: as in ``load``.
        manifest: of the package; None in one that was read from a pickle.
    """

    places: tuple[str, ...]
    digest: str
    size: int
    device: str
    on_miss: str
    manifest: Manifest | None = None

    @classmethod
    def of(cls, source: Places, **rest: Any) -> Self:
        """An origin whose places are those of ``load``."""
        places = [source] if isinstance(source, str | os.PathLike) else source
        known = (shown(str(place)) if is_url(place) else str(Path(place).absolute()) for place in places)
        return cls(places=tuple(known), **rest)

    @property
    def specs(self) -> Mapping[str, AttentionSpec]:
        """Of the package, by name."""
        return {} if self.manifest is None else self.manifest.specs

    def state(self) -> dict[str, Any]:
        """Plain values for a pickle. The store keeps the package's index, so that it can answer too."""
        if self.manifest is not None:
            keep_front(self.manifest, self.digest, Store())
        return {name: kind(getattr(self, name)) for name, kind in _FIELDS.items()}

    @classmethod
    def from_state(cls, state: object) -> Self:
        """The reverse.

        Raises:
            InputError: anything else.
        """
        right = (
            isinstance(state, Mapping)
            and state.keys() == _FIELDS.keys()
            and all(type(state[name]) is kind for name, kind in _FIELDS.items())
        )
        if not right:
            raise InputError(
                "this pickle of an aotpack attention cannot be read",
                expected=f"a table of {', '.join(_FIELDS)}",
                found=repr(state)[:200],
                remedy="pickle it again with this release of aotpack, or load the package and set it anew",
            )
        assert isinstance(state, Mapping)
        return cls(**{**state, "places": tuple(map(str, state["places"]))})


def reload_pack(state: object) -> Pack:
    """What a pickled ``Pack`` becomes: the same package, by its digest, on the device of the same name.

    Raises:
        AotpackError: as ``load``; neither its place nor the store has the package with this digest.
    """
    from aotpack.runtime.loading import load_again

    return load_again(Origin.from_state(state))


def reload_attention(state: object, name: str, spec: Mapping[str, Any]) -> Attention:
    """What a pickled ``Attention`` becomes.

    Raises:
        AotpackError: as ``reload_pack``.
        MismatchError: the package's attention of that name has another spec.
    """
    pack = reload_pack(state)
    pack.require({name: AttentionSpec.from_dict(spec)})
    return pack.attention(name)
