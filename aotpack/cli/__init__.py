"""The ``aotpack`` program. Data goes to stdout, talk to stderr; every command has ``--json``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from aotpack.cli.app import app
from aotpack.cli.boundary import run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line, the process's own when none is given; returns the exit code."""
    return run(app, list(sys.argv[1:] if arguments is None else arguments))
