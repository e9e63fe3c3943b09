"""What a bench is run with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from aotpack.errors import InputError
from aotpack.package import Package
from aotpack.spec import AttentionSpec, MaskSpec

__all__ = ["Settings", "default_specs"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Of one bench.

    Attributes:
        package: a package file with at least one spec of the mask family ``dflash``.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; benches other than ``coldstart`` measure the CPU.
        repeat: measurements of each row.
        context: context tokens S; None is the bench's own.
        anchors: draft blocks N; None is the bench's own.
        slow: also rivals that take minutes.
        say: called with a line when a measurement begins.
    """

    package: Path
    device: str = "cpu"
    repeat: int = 3
    context: int | None = None
    anchors: int | None = None
    slow: bool = False
    say: Callable[[str], None] = lambda text: None

    def specs(self) -> dict[str, AttentionSpec]:
        """The package's specs that can be measured.

        Raises:
            InputError: there is none.
        """
        with Package.open(self.package) as package:
            specs = package.manifest.specs
        usable = {name: spec for name, spec in specs.items() if spec.mask.family == "dflash"}
        if not usable:
            raise InputError(
                f"{self.package} has nothing that can be measured",
                expected="a spec of the mask family dflash",
                found=", ".join(spec.mask.family for spec in specs.values()) or "no spec",
            )
        return usable


def default_specs(*dtypes: str) -> dict[str, AttentionSpec]:
    """The attention of a small drafter, qwen2.5-0.5b-dflash, by dtype: 14/2 heads of 64, blocks of 16."""
    mask = MaskSpec(family="dflash", block_size=16)
    return {
        dtype: AttentionSpec(heads=14, kv_heads=2, head_dim=64, dtype=dtype, mask=mask) for dtype in dtypes
    }
