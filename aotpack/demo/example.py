"""What every example does around its training: a package that is built here, and our exit codes."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from aotpack.errors import AotpackError

__all__ = ["exit_codes", "package_here"]


def package_here(source: Path, name: str, *kinds: str, build: bool = True) -> Path:
    """Path of a package for device types, built in this folder if it is not there yet.

    Args:
        source: a config or a spec file.
        name: begins the file's name.
        kinds: ``"cpu"``, ``"cuda"``.
        build: whether this process is the one that builds.

    Raises:
        subprocess.CalledProcessError: the build failed, and said why on stderr.
    """
    path = Path(f"{name}-{'-'.join(kinds)}.aotpack")
    if build and not path.exists():
        targets = [f"--target={kind}" for kind in kinds]
        command = [sys.executable, "-m", "aotpack", "build", str(source), *targets, "-o", str(path)]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Ends the process as the command line would: an error of ours on stderr, with its exit code."""
    try:
        yield
    except AotpackError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(error.exit_code)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
