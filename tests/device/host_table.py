"""The table of ``host_round.py``: starts of a trainer, kept as JSON and printed as text."""

from __future__ import annotations

import collections
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from aotpack.bench.rivals import NAMES
from aotpack.files import replace_file

SCHEMA = "aotpack.device.host/1"
OWN, FLEX = NAMES["aotpack"], NAMES["flex"]
OUTCOMES = ("finished", "hung", "unfinished", "failed", "died")


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the trainer; seconds are since its process was started, and tuples have a value a thread.

    Attributes:
        who: made the attention.
        outcome: one of ``OUTCOMES``.
        seconds: until all threads had ended, or the process had.
        imported_s: torch, transformers and aotpack were imported.
        made_s: target and drafters were on their devices.
        loaded_s: the thread had its attention; with torch.compile nothing is compiled yet.
        gradients_s: the thread's first forward and backward were done on its device.
        first_step_s: its first step was, with the mean gradient of all threads and the optimizer's step.
        steps: optimizer steps done.
        traces: that were refused; None for a rival, where none is.
        equal: whether the replicas held the same bits at the end.
        losses: the first and the last, the mean over the threads.
        lengths: how many different (S, N) the steps had.
        devices: names of the target's device and of each thread's.
        caches: compile caches and temporary files that were left; empty folders are not counted.
        errors: what threads raised, or how the process ended.
        places: the innermost frame of each thread of a process that did not end in order.
    """

    who: str
    outcome: str
    seconds: float
    imported_s: float | None
    made_s: float | None
    loaded_s: tuple[float | None, ...]
    gradients_s: tuple[float | None, ...]
    first_step_s: tuple[float | None, ...]
    steps: tuple[int, ...]
    traces: int | None
    equal: bool
    losses: tuple[float, ...]
    lengths: int
    devices: tuple[str, ...]
    caches: tuple[str, ...]
    errors: tuple[str, ...]
    places: tuple[str, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Start:
        """From the JSON of a start."""
        found = {field.name: values[field.name] for field in fields(cls)}
        return cls(**{name: tuple(v) if isinstance(v, list) else v for name, v in found.items()})

    def line(self) -> str:
        """The start in a line, with what was raised."""
        first = [seconds for seconds in self.gradients_s if seconds is not None]
        steps = [seconds for seconds in self.first_step_s if seconds is not None]
        text = (
            f"{self.who}: {self.outcome}, {self.seconds:.2f} s; first gradients at {_times(first)}, "
            f"first steps at {_times(steps)}; steps {_list(self.steps)}"
        )
        return "\n  ".join([text, *sorted(set(self.errors))])


def table(starts: Sequence[Start]) -> list[dict[str, Any]]:
    """One row for each who, with medians, least and greatest over its starts."""
    return [row([s for s in starts if s.who == who]) for who in dict.fromkeys(s.who for s in starts)]


def row(starts: Sequence[Start]) -> dict[str, Any]:
    """The row of starts of one kind. A time is over the starts that came so far with all threads."""
    outcomes = collections.Counter(start.outcome for start in starts)

    def over(value: Callable[[Start], float | None]) -> dict[str, float] | None:
        return summary(found for start in starts if (found := value(start)) is not None)

    traces = [start.traces for start in starts if start.traces is not None]
    return {
        "who": starts[0].who,
        "starts": len(starts),
        **{outcome: outcomes[outcome] for outcome in OUTCOMES},
        "threads_with_gradients": summary(_known(start.gradients_s) for start in starts),
        "steps": summary(min(start.steps) for start in starts),
        "traces": sum(traces) if traces else None,
        "equal": sum(start.equal for start in starts),
        "first_step_s": over(lambda s: _last(s.first_step_s)),
        "spread_gradients_s": over(lambda s: _spread(s.gradients_s)),
        "spread_first_step_s": over(lambda s: _spread(s.first_step_s)),
        "import_s": over(lambda s: s.imported_s),
        "models_s": over(lambda s: s.made_s),
        "loaded_s": over(lambda s: _last(s.loaded_s)),
        "finished_s": over(lambda s: s.seconds if s.outcome == "finished" else None),
        "failed_s": over(lambda s: s.seconds if s.outcome in ("failed", "died") else None),
        "errors": _counted(error for start in starts for error in set(start.errors)),
        "places": _counted(place for start in starts for place in set(start.places)),
    }


def missed(starts: Iterable[Start], steps: int) -> list[str]:
    """What aotpack's own starts did not do and must."""
    found = []
    own = [start for start in starts if start.who == OWN]
    for number, start in enumerate(own, start=1):
        for wrong, what in (
            (start.outcome != "finished", start.outcome),
            (set(start.steps) != {steps}, f"threads trained {_list(start.steps)} steps of {steps}"),
            (start.traces != 0, f"{start.traces} traces"),
            (not start.equal, "the replicas were not seen to be equal"),
            (bool(start.caches), f"left {', '.join(start.caches)}"),
            (bool(start.errors), "; ".join(start.errors)),
        ):
            if wrong:
                found.append(f"start {number}: {what}")
    return found


def command(settings: Mapping[str, Any], starts: Sequence[Start]) -> str:
    """The one command that makes such a table."""
    counts = collections.Counter(start.who for start in starts)
    devices = dict.fromkeys((settings["target"], *settings["drafters"]))
    options = {
        "package": settings["package"],
        "devices": ",".join(devices),
        "threads": len(settings["drafters"]),
        **{n: settings[n] for n in ("spec", "rows", "context", "anchors", "hidden", "layers", "steps")},
        "starts": counts[OWN],
        "rival-starts": counts[FLEX],
        "watchdog": f"{settings['watchdog']:g}",
    }
    words = ["python", "tests/device/host_round.py"]
    return shlex.join([*words, *(str(word) for name, v in options.items() for word in (f"--{name}", v))])


def text(settings: Mapping[str, Any], starts: Sequence[Start]) -> str:
    """The table for people, after what was run."""
    rows = table(starts)
    names = next((start.devices for start in starts if start.devices), ())
    where = f"target on {settings['target']}, drafters on {_list(settings['drafters'])}"
    machine = f"{settings['processors']} processors, {_list(dict.fromkeys(names))}"
    lines = [
        command(settings, starts),
        f"torch {settings['torch']}; {machine}; {where}",
        "",
        _cells("", [found["who"] for found in rows]),
    ]
    counts = ("starts", *OUTCOMES, "traces", "equal")
    labels = {
        "equal": "starts with equal replicas",
        "threads_with_gradients": f"threads with a gradient, of {len(settings['drafters'])}",
        "steps": f"steps of the slowest thread, of {settings['steps']}",
        "first_step_s": "first step of the last thread, s",
        "spread_gradients_s": "first gradients, last - first thread, s",
        "spread_first_step_s": "first steps, last - first thread, s",
        "import_s": "imports done, s",
        "models_s": "models on their devices, s",
        "loaded_s": "attention of the last thread loaded, s",
        "finished_s": "all steps done, s",
        "failed_s": "failed or died, s",
    }
    lines += [_cells(labels.get(name, name), [_cell(found[name]) for found in rows])
              for name in dict.fromkeys((*counts, *labels))]  # fmt: skip
    for found in rows:
        for what in ("errors", "places"):
            lines += [f"{found['who']}, {count} x {said}" for said, count in found[what].items()]
    lines.append("times since the start of the process: median (least to greatest)")
    return "\n".join(lines)


def write(folder: Path, settings: Mapping[str, Any], starts: Sequence[Start]) -> None:
    """Both files, each as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": SCHEMA,
        "command": command(settings, starts),
        "settings": dict(settings),
        "table": table(starts),
        "starts": [asdict(start) for start in starts],
    }
    replace_file(folder / "host.json", (json.dumps(data, indent=1) + "\n").encode())
    replace_file(folder / "host.txt", (text(settings, starts) + "\n").encode())


def read(folder: Path, settings: Mapping[str, Any]) -> list[Start]:
    """The starts of earlier calls; ends the program where their settings were others."""
    path = folder / "host.json"
    if not path.exists():
        return []
    data = json.loads(path.read_text())
    if (data["schema"], data["settings"]) != (SCHEMA, json.loads(json.dumps(settings))):
        sys.exit(f"{path} was made with other settings; name another folder\n"
                 f"there: {data['settings']}\nnow:   {dict(settings)}")  # fmt: skip
    return [Start.of(values) for values in data["starts"]]


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """Median, least and greatest of some values, and how many; None of none."""
    known = list(values)
    if not known:
        return None
    median = round(statistics.median(known), 4)
    return {"median": median, "least": min(known), "greatest": max(known), "count": len(known)}


def _known(values: Sequence[float | None]) -> int:
    return sum(value is not None for value in values)


def _last(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None


def _spread(values: Sequence[float | None]) -> float | None:
    last = _last(values)
    return None if last is None else round(last - min(value for value in values if value is not None), 4)


def _counted(values: Iterable[str]) -> dict[str, int]:
    return dict(collections.Counter(values).most_common())


def _times(values: Sequence[float]) -> str:
    return f"{_list([f'{value:.2f}' for value in values])} s" if values else "-"


def _list(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


def _cells(label: str, cells: Iterable[str]) -> str:
    return f"{label:<42}" + "".join(f"{cell:<32}" for cell in cells).rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, dict):
        return str(value)
    median, least, greatest = (f"{value[name]:.4g}" for name in ("median", "least", "greatest"))
    return median if least == greatest else f"{median} ({least} to {greatest})"
