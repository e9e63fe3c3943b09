"""Facts read from shared libraries with binutils, which come with the C++ compiler."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from aotpack.build.toolchain import tool

__all__ = ["imported_symbols", "needed", "strip", "symbol_version", "uses_zmm"]


def _run(name: str, *arguments: str) -> str:
    return subprocess.run([tool(name), *arguments], check=True, capture_output=True, text=True).stdout


def strip(library: Path) -> None:
    """Removes every symbol and section that loading does not need, in place."""
    _run(
        "strip",
        "--strip-unneeded",
        "--remove-section=.comment",
        "--remove-section=.note.gnu.build-id",
        str(library),
    )


def needed(library: Path) -> tuple[str, ...]:
    """Sonames of the libraries it asks for, sorted."""
    return tuple(sorted(re.findall(r"\(NEEDED\).*\[(.+?)\]", _run("readelf", "-dW", str(library)))))


def imported_symbols(library: Path) -> tuple[str, ...]:
    """Names of the undefined symbols with their versions cut off, sorted."""
    lines = _run("nm", "-D", "--undefined-only", str(library)).splitlines()
    return tuple(sorted({line.split()[-1].split("@")[0] for line in lines if line.strip()}))


def symbol_version(library: Path, prefix: str) -> str:
    """Highest version of imported symbols such as ``GLIBC`` or ``GLIBCXX``; "0" when it imports none."""
    text = _run("nm", "-D", "--undefined-only", str(library))
    found = re.findall(rf"@{prefix}_([0-9.]+)", text)
    return max(found, key=lambda v: tuple(map(int, v.split("."))), default="0")


def uses_zmm(library: Path) -> bool:
    """Whether any instruction names a 512-bit register."""
    return "%zmm" in _run("objdump", "-d", "--no-show-raw-insn", str(library))
