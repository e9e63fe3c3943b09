"""Facts of a cubin, read from the file itself with the cuobjdump that comes with triton."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aotpack.errors import BuildError, HostError
from aotpack.targets import Kernel

__all__ = ["Cubin", "read"]

# From compute capability 8.0 on each block that uses shared memory takes this much for the system. cuobjdump
# counts it, what a block may opt in to does not.
_RESERVED: Final = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Cubin:
    """One cubin file.

    Attributes:
        path: of the file.
        capability: that it was compiled for, ``"9.0a"``.
        toolkit: CUDA release of the assembler that made it, ``"12.9"``.
        ptx: version of the PTX that it was made from, ``"8.7"``.
        kernels: its entry points.
    """

    path: Path
    capability: str
    toolkit: str
    ptx: str
    kernels: tuple[Kernel, ...]


def read(path: Path, *, ptx: str, dynamic_shared_memory: int) -> Cubin:
    """Reads a cubin that was made from that version of PTX.

    Its kernels are launched with that many bytes of dynamic shared memory.

    Raises:
        HostError: triton lacks cuobjdump.
        BuildError: the file is no cubin.
    """
    header = re.search(r"sm=(\d+)(\d)([af]?), toolkit=(\d\d)\.?(\d+),", _cuobjdump("-elf", path))
    usage = re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", _cuobjdump("-res-usage", path)
    )
    if header is None or not usage:
        raise BuildError(f"{path.name} is no cubin that cuobjdump can read", remedy="report this")
    major, minor, suffix, *toolkit = header.groups()
    return Cubin(
        path=path,
        capability=f"{major}.{minor}{suffix}",
        toolkit=".".join(toolkit),
        ptx=ptx,
        kernels=tuple(
            Kernel(
                name=name,
                shared_memory=max(0, int(shared) - _RESERVED) + dynamic_shared_memory,
                registers=int(registers),
                spills=int(stack) + int(local),
            )
            for name, registers, stack, shared, local in usage
        ),
    )


def _cuobjdump(option: str, path: Path) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise HostError(
            "triton's cuobjdump is missing",
            expected=tool,
            remedy="install the triton that torch's CUDA wheel asks for",
        )
    done = subprocess.run([tool, option, path], capture_output=True, text=True, check=False)
    return done.stdout
