"""Where a command's words go: data to stdout, talk to stderr."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import click

from aotpack.errors import OutputError

__all__ = ["Console", "talking", "write_error", "write_json"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Console:
    """What the user asked to see.

    Attributes:
        json: one JSON object instead of text.
        quiet: no talk but errors.
        verbose: more talk.
    """

    json: bool = False
    quiet: bool = False
    verbose: bool = False

    def say(self, text: str) -> None:
        """Talk."""
        if not self.quiet:
            write_error(text)

    def detail(self, text: str) -> None:
        """Talk that was asked for with -v."""
        if self.verbose:
            write_error(text)

    def show(self, schema: str, data: Mapping[str, Any], text: str) -> None:
        """A command's result, once: the JSON object or the text."""
        if self.json:
            write_json(schema, data)
        else:
            _write(text)

    @property
    def live(self) -> bool:
        """Whether stderr is a terminal on which a line may be drawn over."""
        return not self.quiet and sys.stderr is not None and sys.stderr.isatty()

    def paint(self, text: str, color: str) -> str:
        """The text in a colour, where stdout is a terminal and NO_COLOR is not set."""
        colored = not os.environ.get("NO_COLOR") and sys.stdout is not None and sys.stdout.isatty()
        return click.style(text, fg=color) if colored else text


def talking(function: F) -> F:
    """Gives a command the options --json, -q and -v, and a Console as its first argument."""

    @click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
    @click.option("-q", "--quiet", is_flag=True, help="No talk on stderr but errors.")
    @click.option("-v", "--verbose", is_flag=True, help="More talk, and tracebacks.")
    @functools.wraps(function)
    def command(*args: Any, as_json: bool, quiet: bool, verbose: bool, **options: Any) -> Any:
        return function(Console(json=as_json, quiet=quiet, verbose=verbose), *args, **options)

    return command  # type: ignore[return-value]


def write_error(text: str) -> None:
    """A line on stderr; where nobody can read it, nothing."""
    try:
        click.echo(text, err=True)
    except OSError:
        return


def write_json(schema: str, data: Mapping[str, Any]) -> None:
    """One JSON object on stdout, its schema first."""
    _write(json.dumps({"schema": schema, **data}, indent=2, allow_nan=False))


def _discard_stdout() -> None:
    # What is still buffered would be written again as the interpreter ends, and fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _write(text: str) -> None:
    if sys.stdout is None:
        # The caller has closed it: nobody wants the result.
        return
    try:
        click.echo(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; the exit code still says how the command ended.
        _discard_stdout()
    except OSError as error:
        _discard_stdout()
        raise OutputError(
            "the result cannot be written to stdout",
            found=error.strerror,
            remedy="check where stdout is redirected to",
        ) from error
