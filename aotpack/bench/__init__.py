"""Figures beside what users have without us. Every measurement runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from aotpack.bench import coldstart, mask, memory, overhead, scaling, size, step, threads, train
from aotpack.bench.case import Shape
from aotpack.bench.results import Result, Row
from aotpack.bench.rivals import NAMES
from aotpack.bench.settings import Settings, default_specs
from aotpack.errors import AotpackError, InputError

__all__ = [
    "BENCHES",
    "NAMES",
    "Report",
    "Result",
    "Row",
    "Settings",
    "Shape",
    "default_specs",
    "run",
    "run_all",
]

# In the order of "all": what takes long comes last.
BENCHES: Final[Mapping[str, Callable[[Settings], Result]]] = {
    "mask": mask.run,
    "step": step.run,
    "memory": memory.run,
    "overhead": overhead.run,
    "size": size.run,
    "threads": threads.run,
    "scaling": scaling.run,
    "train": train.run,
    "coldstart": coldstart.run,
}
_CPU_ONLY: Final = frozenset({"threads"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All benches.

    Attributes:
        results: of those that could measure aotpack.
        failed: why the others could not, by name.
        left_out: benches that do not measure the device.
    """

    results: tuple[Result, ...]
    failed: Mapping[str, str]
    left_out: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON values, without the schema: all rows, each named after its bench, then bench by bench."""
        parts = {result.name: result.to_dict() for result in self.results}
        rows = [
            {**row, "what": f"{name}: {row['what']}"}
            for name, part in parts.items()
            for row in part.pop("rows")
        ]
        return {"rows": rows, **parts, "failed": dict(self.failed), "left_out": list(self.left_out)}


def run(name: str, settings: Settings) -> Result:
    """Runs one bench by name.

    Raises:
        InputError: it does not measure that device.
        RefusedError: aotpack itself could not be measured.
    """
    if settings.cuda and name in _CPU_ONLY:
        raise InputError(
            f"the bench {name} measures the CPU",
            expected="cpu",
            found=settings.device,
            remedy=f"run one of {', '.join(each for each in BENCHES if each not in _CPU_ONLY)}",
        )
    return BENCHES[name](settings)


def run_all(settings: Settings, done: Callable[[Result], None] = lambda result: None) -> Report:
    """Runs every bench that measures the device; one that fails does not keep the others from running.

    Args:
        settings: of all.
        done: called with each result as it is there.
    """
    results: list[Result] = []
    failed: dict[str, str] = {}
    left_out = tuple(name for name in BENCHES if settings.cuda and name in _CPU_ONLY)
    for name in left_out:
        settings.say(f"{name} is left out: it measures the CPU")
    for name in BENCHES:
        if name in left_out:
            continue
        try:
            results.append(run(name, settings))
        except AotpackError as error:
            failed[name] = error.problem
            settings.say(f"{name} failed: {error}")
            continue
        done(results[-1])
    return Report(results=tuple(results), failed=failed, left_out=left_out)
