"""What a measuring process is given: a spec of a package, a device and lengths."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

__all__ = ["Case", "Shape"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Lengths of a step: batch B, context tokens S, draft blocks N."""

    batch: int = 1
    context: int
    anchors: int

    def __str__(self) -> str:
        return f"B {self.batch} S {self.context} N {self.anchors}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One workload.

    Attributes:
        package: a package file, absolute.
        spec: the name of one of its specs.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        batch, context, anchors: as in ``Shape``.
    """

    package: str
    spec: str
    device: str = "cpu"
    batch: int = 1
    context: int
    anchors: int

    @classmethod
    def of(cls, package: Path, spec: str, device: str, shape: Shape) -> Case:
        """With the lengths of a shape."""
        return cls(package=str(package.absolute()), spec=spec, device=device, **asdict(shape))

    def at(self, shape: Shape) -> Case:
        """The same with other lengths."""
        return replace(self, **asdict(shape))

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)
