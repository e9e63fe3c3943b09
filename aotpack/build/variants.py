"""From a worker's facts to the variants and programs of a manifest, and their files to blobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aotpack.package import Program, Variant, blob_key
from aotpack.targets import CudaRequirements, Kernel, Requirements, Target, driver_floor

__all__ = ["variants"]


def variants(result: Mapping[str, Any], target: Target, blobs: dict[str, bytes]) -> Iterator[Variant]:
    """The variants for a target, by what a worker says of each digest; their files are added to ``blobs``."""

    def add(path: str) -> str:
        data = Path(path).read_bytes()
        key = blob_key(data)
        blobs[key] = data
        return key

    for digest, made in result.items():
        programs = made["programs"]
        yield Variant(
            spec=digest,
            target=str(target),
            programs=tuple(
                Program(
                    name=p["name"],
                    specialisation=p.get("specialisation", "general"),
                    bounds=p.get("bounds", {}),
                    kernels=tuple((Path(c["path"]).name, add(c["path"])) for c in p.get("cubins", ())),
                    library=add(p["library"]),
                    inputs=tuple(p["inputs"]),
                    outputs=tuple(p["outputs"]),
                )
                for p in programs
            ),
            requires=_requirements(programs),
            vectors=add(made["vectors"]) if "vectors" in made else None,
            tolerance=made["tolerance"],
        )


def _requirements(programs: Sequence[Mapping[str, Any]]) -> Requirements:
    def highest(name: str) -> str:
        return _highest(p[name] for p in programs)

    cubins = [cubin for p in programs for cubin in p.get("cubins", ())]
    return Requirements(
        instruction_set=programs[0]["instruction_set"],
        glibc=highest("glibc"),
        libstdcxx=highest("libstdcxx"),
        needed=tuple(sorted({n for p in programs for n in p["needed"]})),
        torch_symbols=tuple(sorted({s for p in programs for s in p["torch_symbols"]})),
        cuda=_cuda_requirements(cubins, programs) if cubins else None,
    )


def _cuda_requirements(
    cubins: Sequence[Mapping[str, Any]], programs: Sequence[Mapping[str, Any]]
) -> CudaRequirements:
    (capability,) = {cubin["capability"] for cubin in cubins}
    return CudaRequirements(
        capability=capability,
        kernels=tuple(Kernel(**kernel) for cubin in cubins for kernel in cubin["kernels"]),
        driver=driver_floor(_highest(cubin["toolkit"] for cubin in cubins)),
        ptx=_highest(cubin["ptx"] for cubin in cubins),
        symbols=tuple(sorted({s for p in programs for s in p["cuda_symbols"]})),
    )


def _highest(versions: Iterable[str]) -> str:
    return max(versions, key=lambda version: tuple(map(int, version.split("."))))
