"""Figures beside what users have without us. Every measurement runs in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from aotpack.bench import coldstart, step, threads
from aotpack.bench.results import Result, Row
from aotpack.bench.settings import Settings, default_specs
from aotpack.errors import InputError

__all__ = ["BENCHES", "Result", "Row", "Settings", "default_specs", "run"]

BENCHES: Final[Mapping[str, Callable[[Settings], Result]]] = {
    "coldstart": coldstart.run,
    "step": step.run,
    "threads": threads.run,
}


def run(name: str, settings: Settings) -> Result:
    """Runs one bench by name: ``"coldstart"``, ``"step"`` or ``"threads"``.

    Raises:
        InputError: it does not measure that device.
    """
    if settings.device != "cpu" and name != "coldstart":
        raise InputError(
            f"the bench {name} measures the CPU",
            expected="cpu",
            found=settings.device,
            remedy="run coldstart",
        )
    return BENCHES[name](settings)
