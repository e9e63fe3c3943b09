"""A package's libraries in torch's own loader.

The only module that touches ``torch._C._aoti.AOTIModelPackageLoader`` and
``torch._C.PyTorchFileWriter``; tried with torch 2.14.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotpack.errors import InputError
from aotpack.package import Package, Program
from aotpack.runtime.loading import choose_variants
from aotpack.spec import AttentionSpec

__all__ = ["TorchPrograms"]


class TorchPrograms:
    """Forward and backward of a package's variant for this machine, each a .pt2 file.

    Args:
        package: a package file.
        spec: one of its specs.
        folder: for the .pt2 files, which the loader reads when it is made.
        runners: calls of one program that may run at once.
    """

    def __init__(self, package: str, spec: AttentionSpec, folder: Path, *, runners: int) -> None:
        with Package.open(package) as opened:
            chosen, _ = choose_variants(opened.manifest, "cpu")
            programs = {p.name: p for p in chosen[spec.digest].programs}
            self._forward, self._backward = programs["forward"], programs["backward"]
            self._run_forward, self._run_backward = (
                _loader(opened, program, folder, runners) for program in (self._forward, self._backward)
            )

    def mask_inputs(self, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
        """The block mask's tensors by the names of the programs' inputs."""
        names = [name for name in self._forward.inputs if name.startswith("mask.")]
        return dict(zip(names, tensors, strict=True))

    def step(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Forward and backward: grad.q, grad.k, grad.v."""
        outputs = self._run_forward.run([inputs[name] for name in self._forward.inputs])
        known = {**inputs, **dict(zip(self._forward.outputs, outputs, strict=True))}
        gradients: list[Tensor] = self._run_backward.run([known[name] for name in self._backward.inputs])
        return gradients


def _loader(package: Package, program: Program, folder: Path, runners: int) -> Any:
    path = folder / f"{program.name}.pt2"
    writer = torch._C.PyTorchFileWriter(str(path))
    records = {
        "archive_format": b"pt2",
        "data/aotinductor/model/program.wrapper.so": package.read_blob(program.library),
        "data/aotinductor/model/program.wrapper_metadata.json": json.dumps(
            {"AOTI_DEVICE_KEY": "cpu"}
        ).encode(),
    }
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, runners, -1)
    except RuntimeError as error:
        raise InputError("torch's own loader refuses the library", found=error) from error
