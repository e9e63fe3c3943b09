"""What a bench is run with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from aotpack.bench.case import Case, Shape
from aotpack.bench.protocol import TIMEOUT
from aotpack.errors import InputError
from aotpack.package import Package
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["Settings", "default_specs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of one bench.

    Attributes:
        package: a package file with at least one spec of the mask family ``dflash``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        repeat: measurements of each row.
        spec: the only spec that is measured; None is all for ``step``, else the first.
        batch, context, anchors: B, S and N; None is the bench's own.
        timeout: seconds that a rival may take to get ready, and for each measurement.
        without: rivals that are left out, keys of ``rivals.NAMES``.
        say: called with a line when a measurement begins or ends.
    """

    package: Path
    device: str = "cpu"
    repeat: int = 3
    spec: str | None = None
    batch: int | None = None
    context: int | None = None
    anchors: int | None = None
    timeout: float = TIMEOUT
    without: frozenset[str] = frozenset()
    say: Callable[[str], None] = lambda text: None

    @property
    def cuda(self) -> bool:
        """Whether a CUDA device is measured."""
        return self.device != "cpu"

    def specs(self) -> dict[str, AttentionSpec]:
        """The package's specs that can be measured.

        Raises:
            InputError: there is none.
        """
        with Package.open(self.package) as package:
            specs = package.manifest.specs
        usable = {
            name: spec
            for name, spec in specs.items()
            if spec.mask.family == "dflash" and self.spec in (None, name)
        }
        if not usable:
            raise InputError(
                f"{self.package} has nothing that can be measured",
                expected=f"a spec {self.spec or ''} of the mask family dflash".replace("  ", " "),
                found=", ".join(f"{name} ({spec.mask.family})" for name, spec in specs.items()) or "no spec",
                remedy="choose another package or spec",
            )
        return usable

    def first(self) -> tuple[str, AttentionSpec]:
        """The first of ``specs``."""
        return next(iter(self.specs().items()))

    def shapes(self, cpu: Iterable[Shape], cuda: Iterable[Shape]) -> tuple[Shape, ...]:
        """The bench's own shapes for the device or, where lengths were asked for, the first with those."""
        own = tuple(cuda if self.cuda else cpu)
        asked = {"batch": self.batch, "context": self.context, "anchors": self.anchors}
        given = {name: value for name, value in asked.items() if value is not None}
        return (replace(own[0], **given),) if given else own

    def case(self, spec: str, shape: Shape) -> Case:
        """A workload of the package on the device."""
        return Case.of(self.package, spec, self.device, shape)

    def wanted(self, rivals: Iterable[str]) -> tuple[str, ...]:
        """Those that were not left out."""
        return tuple(who for who in rivals if who not in self.without)


def default_specs(*dtypes: str) -> dict[str, AttentionSpec]:
    """The attention of a small drafter, qwen2.5-0.5b-dflash, by dtype: 14/2 heads of 64, blocks of 16."""
    mask = MaskSpec(family="dflash", block_size=16)
    return {
        dtype: AttentionSpec(heads=14, kv_heads=2, head_dim=64, dtype=dtype, mask=mask) for dtype in dtypes
    }
