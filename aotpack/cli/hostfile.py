"""A machine's facts as JSON: what ``doctor --json`` writes, ``explain --host`` reads on another machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from aotpack.errors import InputError, IntegrityError
from aotpack.fields import Document, Fields, Form
from aotpack.targets import CudaDevice, HostFacts

__all__ = ["LIBRARIES", "read_host", "write_host"]

# All that a library of ours has ever needed; a name that is not here counts as there.
LIBRARIES: Final = (
    "ld-linux-aarch64.so.1",
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libc10.so",
    "libc10_cuda.so",
    "libcuda.so.1",
    "libgcc_s.so.1",
    "libgomp.so.1",
    "libm.so.6",
    "libstdc++.so.6",
    "libtorch.so",
    "libtorch_cpu.so",
    "libtorch_cuda.so",
)
_LARGEST: Final = 1 << 22
_ANY: Final = Form(r"[ -~]{1,200}", "a short text")
_MANY: Final = 1 << 20


def write_host(host: HostFacts) -> dict[str, Any]:
    """JSON values; ``libraries`` says of each of ``LIBRARIES`` whether it is there."""
    return {
        "machine": host.machine,
        "instruction_set": host.instruction_set,
        "glibc": host.glibc,
        "libstdcxx": host.libstdcxx,
        "torch": host.torch,
        "torch_symbols": sorted(host.torch_symbols or ()),
        "libraries": {name: name in (host.libraries or ()) for name in LIBRARIES},
        "cuda_devices": [
            {
                "name": device.name,
                "capability": list(device.capability),
                "shared_memory": device.shared_memory,
                "driver": device.driver,
            }
            for device in host.cuda_devices
        ],
    }


def read_host(path: Path, needed: Iterable[str]) -> HostFacts:
    """The facts in a file that ``doctor --json`` wrote.

    Args:
        path: of the file.
        needed: names of the libraries that a package needs.

    Raises:
        InputError: the file is not such a file.
    """
    try:
        with path.open("rb") as file:
            data = json.loads(file.read(_LARGEST))
        return _host(Fields(data, document=Document(str(path), _REMEDY)).table("host"), needed)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}", remedy=_REMEDY) from error
    except IntegrityError as error:
        raise InputError(
            error.problem, expected=error.expected, found=error.found, remedy=error.remedy
        ) from error


_REMEDY: Final = "run 'aotpack doctor --json > host.json' on that machine"


def _host(table: Fields, needed: Iterable[str]) -> HostFacts:
    libraries = table.table("libraries")
    known = {name: libraries.value(name) is True for name in libraries.keys(_ANY)}
    return HostFacts(
        machine=table.text("machine", _ANY),
        instruction_set=_optional(table, "instruction_set"),
        glibc=_optional(table, "glibc"),
        libstdcxx=_optional(table, "libstdcxx"),
        torch=_optional(table, "torch"),
        torch_symbols=frozenset(table.texts("torch_symbols", _ANY)),
        libraries=frozenset(name for name in {*known, *needed} if known.get(name, True)),
        cuda_devices=tuple(_device(device) for device in table.tables("cuda_devices")),
    )


def _device(table: Fields) -> CudaDevice:
    capability = table.value("capability")
    match capability:
        case [int(major), int(minor)]:
            pair = major, minor
        case _:
            table.wrong("capability", "two numbers")
    return CudaDevice(
        name=table.text("name", _ANY),
        capability=pair,
        shared_memory=table.integer("shared_memory", 0, _MANY),
        driver=_optional(table, "driver"),
    )


def _optional(table: Fields, key: str) -> str | None:
    return None if table.value(key) is None else table.text(key, _ANY)
