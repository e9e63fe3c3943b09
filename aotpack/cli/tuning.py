"""``aotpack build --tune``: candidates, measurements and a record, before the build itself."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aotpack.cli.console import Console
from aotpack.cli.progress import BuildProgress
from aotpack.cli.text import columns
from aotpack.errors import InputError
from aotpack.spec import AttentionSpec
from aotpack.targets import Target
from aotpack.tuning import CandidateSet, Record, Records

if TYPE_CHECKING:
    from aotpack.bench.tune import Report

__all__ = ["Tune", "describe", "given_records"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tune:
    """What is tuned.

    Attributes:
        specs: by name.
        target: the only CUDA target of the build.
        template, jobs: as in ``aotpack.build.build``.
        tuning: whose choices are tried too.
    """

    specs: Mapping[str, AttentionSpec]
    target: Target
    template: bool
    jobs: int | None
    tuning: Records

    @classmethod
    def of(
        cls,
        specs: Mapping[str, AttentionSpec],
        targets: Sequence[str],
        template: bool,
        jobs: int | None,
        tuning: Records,
    ) -> Tune:
        """Raises ``InputError`` unless just one of the targets is a CUDA target, or as ``Records.check``."""
        found = [target for target in map(Target.parse, targets) if target.device == "cuda"]
        if len(found) != 1:
            raise InputError(
                "--tune is for one CUDA target",
                expected="one --target such as cuda-sm90",
                found=", ".join(targets) or "cpu",
            )
        tuning.check(found, specs)
        return cls(specs=specs, target=found[0], template=template, jobs=jobs, tuning=tuning)

    def candidates(self, console: Console, folder: Path) -> CandidateSet:
        """The first step."""
        from aotpack.build.candidates import build_candidates

        with BuildProgress(console) as progress:
            return build_candidates(
                self.specs,
                self.target,
                folder,
                template=self.template,
                tuning=self.tuning,
                jobs=self.jobs,
                progress=progress,
            )

    def record(self, console: Console, path: Path) -> Report:
        """All steps; refuses first where there is no GPU of the target."""
        from aotpack.bench.tune import check_device, tune

        check_device("cuda", self.target)
        with tempfile.TemporaryDirectory(prefix="aotpack-candidates-") as folder:
            self.candidates(console, Path(folder))
            return tune(Path(folder), path, say=console.say, detail=console.detail)


def given_records(paths: Sequence[Path]) -> Records:
    """The user's records before those that are shipped with aotpack."""
    from aotpack.build.shipped import shipped_records

    return Records(given={str(path): Record.read(path) for path in paths}, shipped=shipped_records())


def describe(folder: Path, found: CandidateSet) -> tuple[dict[str, Any], str]:
    """The result of the first step alone, as JSON values and as text."""
    groups = [
        {
            "spec": group.name,
            "kernels": group.kernels,
            "class": group.length_class,
            "direction": group.direction,
            "packages": sum(each.package is not None for each in group.candidates),
            "refused": [each.refused for each in group.candidates if each.refused is not None],
        }
        for group in found.groups
    ]
    rows = [
        [str(g["spec"]), str(g["class"]), str(g["direction"]), f"{g['packages']} of {len(group.candidates)}"]
        for g, group in zip(groups, found.groups, strict=True)
    ]
    table = columns(rows, ["spec", "lengths", "direction", "candidates"])
    data = {"folder": str(folder), "target": str(found.target), "groups": groups}
    return data, f"{table}\nnow, on a machine with the GPU: aotpack tune {folder} -o RECORD.json"
