"""Copies of one package in several places: which of them answer, and whether they are copies."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aotpack.errors import AotpackError, HostError, InputError, IntegrityError
from aotpack.package import FileSource, Source
from aotpack.package.front import HEADER_SIZE, Front, Header, read_front, read_header
from aotpack.package.source import read_exactly
from aotpack.store.assembled import FrontSource, one_line
from aotpack.store.opening import Place, local_file
from aotpack.store.remote import Patience, RemoteSource
from aotpack.store.urls import is_url

__all__ = ["Replica", "agreed_header", "reach", "sound_front"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One place that answered.

    Attributes:
        place: as it was named.
        source: its bytes.
        header: what its first bytes say.
        start: these bytes.
    """

    place: Place
    source: Source
    header: Header
    start: bytes


def reach(
    places: Sequence[Place], patience: Patience, on_bytes: Callable[[int], None] | None = None
) -> list[Replica]:
    """The places that answer, in their order; a warning says which do not.

    Raises:
        InputError, HostError: none answers.
        IntegrityError: what a place holds is not a package.
    """
    found: list[Replica] = []
    silent: list[AotpackError] = []
    for place in places:
        try:
            found.append(_reach(place, patience, on_bytes))
        except (InputError, HostError) as error:
            silent.append(error)
    if not found and len(silent) == 1:
        raise silent[0]
    if not found:
        raise HostError(
            "the package cannot be read from any of its places",
            found="".join(f"\n    {one_line(error)}" for error in silent),
            remedy="check the network, the URLs and the credentials",
        )
    for unreached in silent:
        warnings.warn(f"aotpack reads from another replica: {one_line(unreached)}", stacklevel=2)
    return found


def agreed_header(replicas: Sequence[Replica]) -> Header:
    """The header that all have.

    Raises:
        IntegrityError: they are not copies of one package.
    """
    if len({(replica.header, replica.source.size) for replica in replicas}) > 1:
        raise IntegrityError(
            "the replicas are not copies of one package",
            expected="the same digest and size everywhere",
            found="".join(
                f"\n    {r.source.name}: digest {r.header.digest}, {r.source.size} bytes" for r in replicas
            ),
            remedy="push one package to all of them, or name those that have it",
        )
    return replicas[0].header


def sound_front(replicas: Sequence[Replica], header: Header) -> tuple[Front, bytes]:
    """The front from the first replica that has it right, and its bytes.

    Raises:
        IntegrityError: none has.
        HostError: none can be read.
    """
    failures: list[AotpackError] = []
    # Each is asked again before it is given up: an answer may be wrong once.
    for replica in (*replicas, *replicas):
        source = replica.source
        try:
            data = replica.start + read_exactly(source, HEADER_SIZE, header.length, "its manifest")
            front = read_front(FrontSource(data, source.name, source.size))
        except (IntegrityError, HostError) as error:
            failures.append(error)
            continue
        if front.digest == header.digest:
            return front, data
    raise failures[0] if failures else _changing(replicas)


def _changing(replicas: Sequence[Replica]) -> HostError:
    names = ", ".join(replica.source.name for replica in replicas)
    return HostError(f"{names} changed while it was read", remedy="load it again")


def _reach(place: Place, patience: Patience, on_bytes: Callable[[int], None] | None) -> Replica:
    source: Source
    if is_url(place):
        source = RemoteSource(str(place), patience=patience, on_bytes=on_bytes)
    else:
        source = FileSource(local_file(Path(place)))
    try:
        try:
            return _replica(place, source)
        except IntegrityError:
            # Asked again before it is given up: an answer may be wrong once.
            return _replica(place, source)
    except BaseException:
        source.close()
        raise


def _replica(place: Place, source: Source) -> Replica:
    start = source.read_range(0, HEADER_SIZE)
    header = read_header(FrontSource(start, source.name, source.size))
    return Replica(place=place, source=source, header=header, start=start)
