"""The measuring process: ``python -m aotpack.bench.child MODULE:FUNCTION``, arguments as JSON on stdin.

The first line of stdin holds the arguments; the first line of stdout is the answer: what the function
returned with the facts of the process, or ``{"refused": why}``. A function that returns a pair, an answer
and another function, measures on: each further line of stdin calls that function once.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["main"]


def main(job: str) -> int:
    """Runs one job of ``aotpack.bench.jobs``."""
    answers, sys.stdout = sys.stdout, sys.stderr
    # However the bench ends, nothing goes on compiling: PR_SET_PDEATHSIG, see prctl(2).
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    arguments = json.loads(sys.stdin.readline())
    import torch

    from aotpack.bench.case import Case

    module, _, name = job.partition(":")
    function = getattr(importlib.import_module(f"aotpack.bench.jobs.{module}"), name)
    case = Case(**arguments.pop("case"))
    device = torch.device(case.device)
    facts = {
        **({"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
    }
    measure: list[Callable[[], dict[str, Any]]] = []

    def begin() -> dict[str, Any]:
        found = function(case, **arguments)
        if isinstance(found, tuple):
            found, once = found
            measure.append(once)
        return {**found, "facts": facts}

    _tell(answers, begin)
    for once in measure:
        for _ in sys.stdin:
            _tell(answers, once)
    return 0


def _tell(answers: TextIO, call: Callable[[], dict[str, Any]]) -> None:
    try:
        answer = call()
    except Exception as error:  # noqa: BLE001
        # Rivals fail in their own ways, and how is a result.
        answer = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
