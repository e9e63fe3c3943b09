"""The build's own processes: starting one, following what it says, and ending all it started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aotpack
from aotpack import errors
from aotpack.errors import AotpackError, BuildError
from aotpack.own import folders
from aotpack.spec import AttentionSpec
from aotpack.targets import Target

__all__ = ["Stage", "run_worker"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One step of a build; ``seconds`` is None when it begins."""

    target: str
    name: str
    spec: str | None
    seconds: float | None


def run_worker(
    specs: Mapping[str, AttentionSpec],
    target: Target,
    options: Mapping[str, Any],
    folder: Path,
    note: Callable[[Stage], None],
) -> dict[str, Any]:
    """Runs a job in a process of its own and returns its result, which names files in ``folder``.

    Args:
        specs: by name, resolved.
        target: a device type.
        options: the job's other fields; see ``aotpack.build.worker``.
        folder: empty; of the job.
        note: called as each stage begins and ends.

    Raises:
        AotpackError: the worker's own; ``BuildError`` where it died.
    """
    job = {
        "specs": {n: s.to_dict() for n, s in specs.items()},
        "target": str(target),
        **options,
        "modules": _module_path(specs),
        "folder": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job))
    (folder / "tmp").mkdir()
    log = folder / "log"
    with log.open("wb") as stderr:
        # A session of its own, so that an interrupt reaches the worker's compilers too, through us.
        worker = subprocess.Popen(
            [sys.executable, "-m", "aotpack.build.worker", str(folder / "job.json")],
            cwd=folder, env=_environment(folder), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=stderr, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            failure = _follow(worker, target, note)
            code = worker.wait()
        except BaseException:
            _kill(worker)
            raise
    if failure is not None:
        raise failure
    if code != 0:
        raise BuildError(
            f"the build for {target} failed",
            found=_failure(log.read_text(errors="replace")) or f"exit code {code}",
            remedy="run 'aotpack doctor'; if it finds nothing, report this",
        )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def _failure(log: str) -> str:
    """What a worker's log says of its failure: compilers' errors where there are any, else the end."""
    errors = [line for line in log.splitlines() if re.search(r"\b(fatal )?error:", line)]
    return "\n".join(errors)[-3000:] or log.strip()[-3000:]


def _follow(
    worker: subprocess.Popen[str], target: Target, note: Callable[[Stage], None]
) -> AotpackError | None:
    failure = None
    for line in worker.stdout or ():
        said = json.loads(line)
        if "error" in said:
            kind: type[AotpackError] = getattr(errors, said["error"])
            failure = kind(
                said["problem"],
                expected=said.get("expected"),
                found=said.get("found"),
                remedy=said.get("what to do"),
            )
        else:
            note(
                Stage(target=str(target), name=said["stage"], spec=said["spec"], seconds=said.get("seconds"))
            )
    return failure


def _kill(worker: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def _environment(folder: Path) -> dict[str, str]:
    # Variables that would change what Inductor or the compiler makes are the build's own, not the user's.
    dropped = (
        "TORCHINDUCTOR_",
        "AOT_INDUCTOR",
        "AOTINDUCTOR",
        "TORCH_COMPILE",
        "TORCH_LOGS",
        "CPATH",
        "CPLUS_INCLUDE_PATH",
        "CUDA_",
        "TRITON_",
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
    source = str(Path(aotpack.__file__).parent.parent)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(filter(None, [source, kept.get("PYTHONPATH", "")])),
        "PYTHONHASHSEED": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TMPDIR": str(folder / "tmp"),
        # A CUDA device of this machine takes no part; targets are device types.
        "CUDA_VISIBLE_DEVICES": "",
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # Source lines are half of a cubin.
        "TRITON_DISABLE_LINE_INFO": "1",
        "LIBRARY_PATH": str(folder),
        # Otherwise export dies: "mul expected 2 arguments, got 3".
        "TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0",
    }


def _module_path(specs: Mapping[str, AttentionSpec]) -> list[str]:
    """Where rules of the user's own are imported from, and what they import; empty without such rules."""
    found = [folder for spec in specs.values() for folder in folders(spec)]
    here = [str(Path(place).resolve()) for place in sys.path]
    return list(dict.fromkeys([*found, *here])) if found else []
