"""What a package is made with and holds, for its manifest: versions, and a bill of materials."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from typing import Any

import aotpack
from aotpack.targets import Target

__all__ = ["bill_of_materials", "toolchain"]


def toolchain(targets: Iterable[Target]) -> dict[str, str]:
    """Versions of everything that decides what a build for these targets makes, byte for byte."""
    import torch

    from aotpack.build.toolchain import compiler_version

    triton = {"triton": version("triton")} if any(t.device == "cuda" for t in targets) else {}
    return {
        "aotpack": aotpack.__version__,
        "compiler": compiler_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **triton,
    }


def bill_of_materials(tools: Mapping[str, str]) -> dict[str, Any]:
    """A CycloneDX 1.6 document of what is compiled into the package's binaries, by ``toolchain``."""
    torch_version = tools["torch"].partition("+")[0]
    components = [
        _component("aotpack", tools["aotpack"], "Apache-2.0", "kernels and calling convention"),
        _component("torch", torch_version, "BSD-3-Clause", "AOTInductor's runtime, flex attention's kernels"),
        _component("libstdc++", tools["compiler"], "GPL-3.0-or-later WITH GCC-exception-3.1", "templates"),
    ]
    if "triton" in tools:
        components.append(_component("triton", tools["triton"], "MIT", "device functions in the cubins"))
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}


def _component(name: str, version: str, license_: str, what: str) -> dict[str, Any]:
    source = {} if name == "libstdc++" else {"purl": f"pkg:pypi/{name}@{version}"}
    return {
        "type": "library",
        "name": name,
        "version": version,
        "description": what,
        "licenses": [{"expression": license_}],
        **source,
    }
