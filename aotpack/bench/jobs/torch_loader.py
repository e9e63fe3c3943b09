"""A package's libraries in torch's own loader.

The only module that touches ``torch._C._aoti.AOTIModelPackageLoader`` and
``torch._C.PyTorchFileWriter``; tried with torch 2.11.0 and 2.14.1.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from aotpack.bench.case import Case
from aotpack.bench.jobs.workload import Workload
from aotpack.errors import InputError
from aotpack.package import Package, Program, Variant
from aotpack.runtime.loading import variants_here
from aotpack.spec import AttentionSpec

__all__ = ["TorchPrograms", "write_programs"]


class TorchPrograms:
    """The programs of a package's variant for a device, each a .pt2 file.

    Args:
        case: the package and the device.
        spec: one of the package's.
        folder: for the .pt2 files.
        specialisation: which forward and backward, where there are several.
    """

    def __init__(
        self,
        case: Case,
        spec: AttentionSpec,
        folder: str | Path,
        *,
        specialisation: str = "general",
    ) -> None:
        with Package.open(case.package) as opened:
            chosen = variants_here(opened.manifest, case.device)
            variant = chosen[spec.digest]
            self._programs = {
                p.name: p
                for p in variant.programs
                if p.specialisation == ("general" if p.name == "block_mask" else specialisation)
            }
            self._files = {
                name: _write(opened, program, Path(folder) / f"{name}.pt2", case.device)
                for name, program in self._programs.items()
            }
        self._runners: dict[str, Any] = {}

    def load(self, runners: int) -> None:
        """Opens the files; ``runners`` calls of one program may run at once.

        Raises:
            InputError: torch's loader refuses one.
        """
        try:
            self._runners = {
                name: torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, runners, -1)
                for name, path in self._files.items()
            }
        except RuntimeError as error:
            raise InputError("torch's own loader refuses the library", found=error) from error

    def block_mask(self, work: Workload) -> dict[str, Tensor]:
        """What the programs take of a step's mask, by the names of their inputs."""
        rule = {"anchors": work.anchors, "keep": work.keep}
        carrier = torch.empty(1, dtype=torch.int8, device=work.keep.device).expand(work.context_len)
        outputs = self._run("block_mask", {**rule, "length.context": carrier})
        return {
            **{f"mask.{name}": tensor for name, tensor in outputs.items()},
            **{f"input.{name}": tensor for name, tensor in rule.items()},
        }

    def step_inputs(self, work: Workload, mask: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What forward and backward take, by the names of their inputs; ``mask`` is from ``block_mask``."""
        tensors = {"q": work.q.detach(), "k": work.k.detach(), "v": work.v.detach(), "grad.out": work.grad}
        return {**mask, **tensors, "grad.lse": torch.zeros(work.q.shape[:3], device=work.q.device)}

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """out, lse and what backward needs of forward."""
        return self._run("forward", inputs)

    def backward(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """grad.q, grad.k, grad.v, from the inputs and outputs of forward."""
        return list(self._run("backward", inputs).values())

    def step(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Forward and backward: grad.q, grad.k, grad.v."""
        return self.backward({**inputs, **self.forward(inputs)})

    def _run(self, name: str, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        program = self._programs[name]
        outputs = self._runners[name].run([inputs[each] for each in program.inputs])
        return dict(zip(program.outputs, outputs, strict=True))


def write_programs(package: Package, variant: Variant, folder: Path, device: str) -> list[Path]:
    """All programs of a variant, each a .pt2 file."""
    return [
        _write(package, program, folder / f"{number}.pt2", device)
        for number, program in enumerate(variant.programs)
    ]


def _write(package: Package, program: Program, path: Path, device: str) -> Path:
    writer = torch._C.PyTorchFileWriter(str(path))
    inside = "data/aotinductor/model"
    records = {
        "archive_format": b"pt2",
        f"{inside}/program.wrapper.so": package.read_blob(program.library),
        # torch 2.11 finds the metadata by the name of the source, which it does not read.
        f"{inside}/program.wrapper.cpp": b"",
        f"{inside}/program.wrapper_metadata.json": json.dumps(
            {"AOTI_DEVICE_KEY": torch.device(device).type}
        ).encode(),
        **{f"{inside}/{name}": package.read_blob(key) for name, key in program.kernels},
    }
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return path
