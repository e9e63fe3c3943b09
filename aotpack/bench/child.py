"""The measuring process: ``python -m aotpack.bench.child MODULE:FUNCTION``, arguments as JSON on stdin.

The answer is the last line of stdout, one JSON object: what the function returned with the facts of the
process, or ``{"refused": why}``.
"""

from __future__ import annotations

import importlib
import json
import os
import sys

__all__ = ["main"]


def main(job: str) -> int:
    """Runs one job of ``aotpack.bench.jobs``."""
    answer, sys.stdout = sys.stdout, sys.stderr
    arguments = json.load(sys.stdin)
    import torch

    module, _, name = job.partition(":")
    function = getattr(importlib.import_module(f"aotpack.bench.jobs.{module}"), name)
    device = torch.device(arguments.get("device", "cpu"))
    facts = {
        **({"device": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
    }
    try:
        result = {**function(**arguments), "facts": facts}
    except Exception as error:  # noqa: BLE001
        # Rivals fail in their own ways, and how is a result.
        result = {"refused": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    print(json.dumps(result), file=answer, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
