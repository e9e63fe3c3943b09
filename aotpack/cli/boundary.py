"""The one place where an exception becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click

from aotpack.cli.console import write_error, write_json
from aotpack.cli.signals import interruptible
from aotpack.errors import AotpackError

__all__ = ["run"]

INTERNAL: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class _Failure:
    code: int
    error: str
    problem: str
    diagnostics: dict[str, str]

    def text(self) -> str:
        """The message for people."""
        return "\n  ".join([self.problem, *(f"{name}: {value}" for name, value in self.diagnostics.items())])

    def to_dict(self) -> dict[str, Any]:
        """The message for programs."""
        parts = {name.replace("what to do", "remedy"): value for name, value in self.diagnostics.items()}
        return {"error": self.error, "exit_code": self.code, "problem": self.problem, **parts}


def run(app: click.Command, arguments: Sequence[str]) -> int:
    """Runs a command line to its end and returns the exit code; only SystemExit leaves it."""
    asked_json = "--json" in arguments
    verbose = any(re.fullmatch(r"-[qv]*v[qv]*|--verbose", argument) for argument in arguments)
    quiet = any(re.fullmatch(r"-[qv]*q[qv]*|--quiet", argument) for argument in arguments)
    try:
        with interruptible(), _short_warnings(quiet):
            code = app.main(args=list(arguments), prog_name="aotpack", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001
        failure = _failure(error)
        if verbose and failure.code == INTERNAL:
            write_error(traceback.format_exc().rstrip())
    write_error(f"aotpack: {failure.text()}")
    if asked_json:
        with contextlib.suppress(AotpackError):
            write_json("aotpack.error/1", failure.to_dict())
    return failure.code


def _failure(error: BaseException) -> _Failure:
    name = type(error).__name__
    if isinstance(error, AotpackError):
        return _Failure(
            code=error.exit_code, error=name, problem=error.problem, diagnostics=error.diagnostics()
        )
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return _Failure(code=INTERRUPTED, error="Interrupted", problem="interrupted", diagnostics={})
    if isinstance(error, click.ClickException):
        context = getattr(error, "ctx", None)
        hint = {"what to do": f"see '{context.command_path} --help'"} if context else {}
        return _Failure(code=USAGE, error="UsageError", problem=error.format_message(), diagnostics=hint)
    said = f"{name}: {error}" if str(error) else name
    hint = {"what to do": "run it again with -v for the traceback, and report it"}
    return _Failure(code=INTERNAL, error=name, problem=f"internal error: {said}", diagnostics=hint)


@contextlib.contextmanager
def _short_warnings(quiet: bool) -> Iterator[None]:
    def show(message: Warning | str, *rest: Any, **more: Any) -> None:
        if not quiet:
            write_error(f"aotpack: warning: {message}")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield
    sys.stderr.flush()
