"""The second and third step of a tuning: candidates are checked and measured, and the record is written."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from aotpack.bench.case import Case
from aotpack.bench.protocol import TIMEOUT, Timing
from aotpack.bench.turns import Entry as Rival
from aotpack.bench.turns import Turns, take_turns
from aotpack.errors import HostError, InputError, NoVariantError
from aotpack.files import check_writable
from aotpack.targets import Target
from aotpack.tuning import (
    Attention,
    CandidateSet,
    Chip,
    Entry,
    Group,
    Measured,
    Record,
    Timed,
    best,
    printable,
)

__all__ = ["Report", "check_device", "tune"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a tuning found.

    Attributes:
        record: as it was written.
        measured: groups that were measured now; the record has others from before.
        without: groups of which no candidate may be chosen; the record says nothing of them.
    """

    record: Record
    measured: tuple[str, ...]
    without: tuple[str, ...]


def check_device(device: str, target: Target) -> Chip:
    """The chip behind a device.

    Raises:
        HostError: there is no such device.
        NoVariantError: it is not of the target's capability.
    """
    where = torch.device(device)
    if target.capability is None and where.type == "cpu":
        return Chip(name=_processor(), capability=None, multiprocessors=os.cpu_count() or 1)
    if where.type != "cuda" or not torch.cuda.is_available():
        raise HostError(
            "there is no GPU here to measure candidates on",
            expected=f"a device for {target}",
            found=device if where.type != "cuda" else "no CUDA device",
            remedy="run 'aotpack tune' on a machine with the GPU; it needs the folder and no compiler",
        )
    if (where.index or 0) >= torch.cuda.device_count():
        raise HostError(f"there is no {device}", expected=f"one of {torch.cuda.device_count()} devices")
    found: Any = torch.cuda.get_device_properties(where)
    chip = Chip(
        name=found.name,
        capability=(found.major, found.minor),
        multiprocessors=found.multi_processor_count,
    )
    if not chip.suits(target):
        raise NoVariantError(
            f"the candidates are for {target} and this GPU is another chip",
            expected=f"a device for {target}",
            found=str(chip),
            remedy="build candidates for this GPU, or measure them on one of their target",
        )
    return chip


def tune(
    folder: Path,
    record: Path,
    device: str = "cuda",
    *,
    repeat: int = 5,
    checks: int = 20,
    again: bool = False,
    timeout: float = TIMEOUT,
    say: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures a folder of candidates and writes what was chosen, group after group.

    The record is written as each group is done. What a record that is there already says of the same
    candidates is kept, so that a run that was ended goes on where it stopped.

    Args:
        folder: that ``aotpack build --tune --candidates`` made.
        record: the file.
        device: ``"cuda"`` or ``"cuda:N"``; ``"cpu"`` for candidates that are packages for the CPU.
        repeat: turns of each candidate.
        checks: how often each result is computed again, to see that it stays the same.
        again: measure also what the record has.
        timeout: seconds in which a candidate must be ready, and answer each turn.
        say, detail: talk.

    Raises:
        InputError: no candidates, or a record of another chip or toolchain is in the way.
        IntegrityError: the candidates' index or the record is wrong.
        HostError, NoVariantError: this machine has not the device; nothing was measured.
        OutputError: the record cannot be written.
    """
    candidates = CandidateSet.read(folder)
    chip = check_device(device, candidates.target)
    tools = {**candidates.tools, "measured with torch": torch.__version__}
    check_writable(record)
    found = _earlier(record, Record(chip=chip, tools=tools))
    measured, without = list[str](), list[str]()
    for group in candidates.groups:
        if not again and _known(found, group):
            say(f"{group}: in the record already")
            continue
        say(f"{group}: {len(group.candidates)} candidates")
        results = _measure(group, folder, device, repeat, checks, timeout, detail)
        entry = _entry(group, results)
        say(_summary(group, results, entry))
        if entry is None:
            without.append(str(group))
            continue
        kept = tuple(each for each in found.entries if each.key != entry.key)
        found = replace(found, entries=(*kept, entry))
        found.write(record)
        measured.append(str(group))
    return Report(record=found, measured=tuple(measured), without=tuple(without))


def _earlier(path: Path, fresh: Record) -> Record:
    if not path.exists():
        return fresh
    found = Record.read(path)
    if (found.chip, dict(found.tools)) != (fresh.chip, dict(fresh.tools)):
        raise InputError(
            f"{path} is a record of another chip or toolchain",
            expected=f"{fresh.chip}, {_versions(fresh.tools)}",
            found=f"{found.chip}, {_versions(found.tools)}",
            remedy="write to another file",
        )
    return found


def _versions(tools: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(tools.items())) or "no versions"


def _known(record: Record, group: Group) -> bool:
    options = [dict(each.options) for each in group.candidates]
    return any(
        entry.key == _blank(group).key and [dict(each.options) for each in entry.candidates] == options
        for entry in record.entries
    )


def _blank(group: Group) -> Entry:
    return Entry(
        attention=Attention.of(group.spec),
        kernels=group.kernels,
        direction=group.direction,
        length_class=group.length_class,
        options={},
        reason="nothing was measured",
    )


def _measure(
    group: Group,
    folder: Path,
    device: str,
    repeat: int,
    checks: int,
    timeout: float,
    say: Callable[[str], None],
) -> tuple[Measured, ...]:
    built = {str(i): each.package for i, each in enumerate(group.candidates) if each.package is not None}
    untuned = next(iter(built.values()), "")
    batch, query, key = group.lengths[0]
    # Only its spec's name and its device matter: each candidate has a package, and lengths, of its own.
    case = Case(
        package=str((folder / untuned).absolute()),
        spec=group.name,
        device=device,
        batch=batch,
        context=key - query,
        anchors=query // group.spec.mask.draft_size,
    )
    shared = {
        "untuned": case.package,
        "spec": group.spec.to_dict(),
        "direction": group.direction,
        "lengths": group.lengths,
        "checked": group.checked,
        "repeats": checks,
    }
    with tempfile.TemporaryDirectory(prefix="aotpack-tune-") as scratch:
        rivals = {
            who: Rival(
                job="candidate:candidate",
                folder=Path(scratch) / who,
                more={"package": str((folder / package).absolute()), **shared},
            )
            for who, package in built.items()
        }
        found = take_turns(rivals, case, repeat=repeat, timeout=timeout, say=say)
    return tuple(
        _measured(group, each.options, each.refused, found.get(str(i)), repeat)
        for i, each in enumerate(group.candidates)
    )


def _measured(
    group: Group, options: Mapping[str, int], refused: str | None, found: Turns | str | None, repeat: int
) -> Measured:
    if not isinstance(found, Turns):
        why = found if found is not None else refused or "not built"
        return Measured(options=options, ok=False, why=printable(why) or "failed")
    timings = []
    for lengths in group.lengths:
        timing = Timing.of(found.of(",".join(map(str, lengths))))
        low, median, high = (_rounded(value) for value in (timing.low, timing.median, timing.high))
        timings.append(Timed(lengths=lengths, median=median, low=low, high=high, count=timing.count))
    whole = len(found.turns) == repeat
    return Measured(
        options=options,
        ok=whole,
        why=None if whole else f"failed after {len(found.turns)} of {repeat} turns",
        error=float(f"{found.info['error']:.3g}"),
        timings=tuple(timings),
    )


def _entry(group: Group, results: tuple[Measured, ...]) -> Entry | None:
    winner = best(results)
    if winner is None:
        return None
    right = sum(each.ok for each in results)
    lengths = "; ".join(",".join(map(str, each)) for each in group.lengths)
    return replace(
        _blank(group),
        options=winner.options,
        reason=f"The best geometric mean of {right} right candidates of {len(results)} at {lengths}.",
        candidates=results,
    )


def _summary(group: Group, results: tuple[Measured, ...], entry: Entry | None) -> str:
    wrong = [f"  not {_words(each.options)}: {each.why}" for each in results if not each.ok]
    if entry is None:
        return "\n".join([f"{group}: no candidate may be chosen", *wrong])
    return "\n".join([f"{group}: {_words(entry.options)}", *wrong])


def _words(options: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items()) or "the untuned options"


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def _processor() -> str:
    names = [line.partition(":")[2].strip() for line in _cpuinfo() if line.startswith("model name")]
    return printable(names[0] if names else platform.machine()) or "failed"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
