"""What all commands have in common: exit codes, where words go, and one JSON object."""

import json
import subprocess
import sys

import click
import pytest

from aotpack import errors
from aotpack.cli.app import app
from aotpack.cli.boundary import run
from aotpack.cli.console import Console, talking
from tests.process import COMMAND, aotpack, only_object

COMMANDS = sorted(app.commands)
ERRORS = {
    errors.NoVariantError: 3,
    errors.MismatchError: 3,
    errors.IntegrityError: 4,
    errors.TrustError: 4,
    errors.HostError: 5,
    errors.OfflineError: 6,
    errors.SelfTestError: 7,
    errors.SpecError: 2,
    errors.TargetError: 2,
    errors.InputError: 2,
    errors.OutputError: 2,
    errors.UnsupportedError: 2,
    errors.BuildError: 1,
}


def failing(error):
    @click.command()
    @talking
    def command(console: Console):
        raise error

    return command


def test_every_command_is_there():
    assert COMMANDS == [
        "bench",
        "build",
        "cache",
        "demo",
        "doctor",
        "explain",
        "inspect",
        "keygen",
        "lock",
        "pull",
        "push",
        "selftest",
        "sign",
        "tune",
        "verify",
    ]


@pytest.mark.parametrize("name", [*sorted(set(COMMANDS) - {"cache"}), "cache ls", "cache verify", "cache gc"])
def test_a_command_takes_json_quiet_and_verbose(name):
    command = app
    for part in name.split():
        command = command.commands[part]
    options = {option for parameter in command.params for option in parameter.opts}
    assert options >= {"--json", "-q", "--quiet", "-v", "--verbose"}


@pytest.mark.parametrize(("kind", "code"), ERRORS.items())
def test_an_error_becomes_its_exit_code_and_one_object(kind, code, capsys):
    assert run(failing(kind("it broke", expected=1, found=2, remedy="mend it")), ["--json"]) == code
    said = capsys.readouterr()
    assert json.loads(said.out) == {
        "schema": "aotpack.error/1",
        "error": kind.__name__,
        "exit_code": code,
        "problem": "it broke",
        "expected": "1",
        "found": "2",
        "remedy": "mend it",
    }
    assert said.err == "aotpack: it broke\n  expected: 1\n  found: 2\n  what to do: mend it\n"


def test_an_error_leaves_stdout_empty(capsys):
    assert run(failing(errors.HostError("it broke")), []) == 5
    assert capsys.readouterr().out == ""


def test_an_internal_error_is_short(capsys):
    assert run(failing(ZeroDivisionError("by zero")), []) == 1
    assert capsys.readouterr().err == (
        "aotpack: internal error: ZeroDivisionError: by zero\n"
        "  what to do: run it again with -v for the traceback, and report it\n"
    )


def test_an_internal_error_has_its_traceback_with_v(capsys):
    assert run(failing(ZeroDivisionError("by zero")), ["-v"]) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last)")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_exits_130(error, capsys):
    assert run(failing(error), ["--json"]) == 130
    assert json.loads(capsys.readouterr().out)["error"] == "Interrupted"


def test_warnings_go_to_stderr_on_one_line(capsys):
    @click.command()
    @talking
    def command(console: Console):
        import warnings

        warnings.warn("look out", stacklevel=1)

    assert run(command, []) == 0
    assert capsys.readouterr() == ("", "aotpack: warning: look out\n")
    assert run(command, ["-q"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("arguments", [["nonsense"], ["inspect"], ["inspect", "x", "--nonsense"], []])
def test_wrong_usage_exits_2_and_talks_on_stderr(arguments):
    done = aotpack(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


@pytest.mark.parametrize("arguments", [["nonsense"], ["inspect"], ["bench", "nonsense"], ["verify", "/nope"]])
def test_wrong_usage_is_one_object_under_json(arguments):
    done = aotpack(*arguments, "--json")
    assert done.returncode == 2
    assert only_object(done)["schema"] == "aotpack.error/1"


def test_the_version_is_printed():
    assert aotpack("--version").stdout.startswith("aotpack 0.")


@pytest.mark.parametrize("name", [None, *COMMANDS])
def test_help_is_printed(name):
    done = aotpack(*([name] if name else []), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Usage: aotpack")


def test_help_needs_neither_torch_nor_transformers():
    heavy = "{'torch', 'transformers'}"
    code = f"from aotpack.cli import main; main(['--help']); import sys; print({heavy} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_reader_that_leaves_early_is_no_error(dflash_package):
    command = [*COMMAND, "inspect", str(dflash_package)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_a_full_disk_is_named(dflash_package):
    with open("/dev/full", "w") as full:  # noqa: PTH123
        command = [*COMMAND, "inspect", str(dflash_package)]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("aotpack: the result cannot be written to stdout")


@pytest.mark.parametrize(
    ("terminal", "no_color", "painted"), [(True, "", True), (True, "1", False), (False, "", False)]
)
def test_colours_are_for_terminals_that_want_them(terminal, no_color, painted, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("NO_COLOR", no_color)
    assert (Console().paint("x", "red") != "x") is painted
