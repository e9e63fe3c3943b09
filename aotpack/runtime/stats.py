"""What a loaded pack did: ``Pack.stats``."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["AttentionStats", "PackStats", "Tally"]


class Tally:
    """A count that any thread adds to, exactly and without a lock: ``add`` is one call into C.

    Attributes:
        add: adds one.
    """

    __slots__ = ("_count", "_lock", "_reads", "add")

    def __init__(self) -> None:
        self._count = itertools.count()
        self._reads = 0
        self._lock = threading.Lock()
        self.add = self._count.__next__

    @property
    def value(self) -> int:
        """How often ``add`` was called up to now."""
        # A counter can only be read by counting; what readers added is taken off again.
        with self._lock:
            found = next(self._count) - self._reads
            self._reads += 1
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionStats:
    """Calls of one attention since it was loaded.

    Attributes:
        spec: digest of its spec.
        folder: of the store, with its libraries; None for the eager fallback.
        block_masks: masks that were made.
        forward: calls of forward by specialisation, also those that checkpointing repeats.
        backward: calls of backward by specialisation.
    """

    spec: str
    folder: str | None
    block_masks: int
    forward: Mapping[str, int] = field(default_factory=dict)
    backward: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackStats:
    """A pack and its calls.

    Every call that has begun is counted, once. While other threads call, the figures are each exact but not
    all of one moment.

    Attributes:
        path: where it was loaded from.
        digest: of the package.
        device: where its attentions run.
        target: the target of the variants that were chosen; None for the eager fallback.
        load_s: what ``aotpack.load`` took, in seconds.
        bytes: of the programs and kernels that were loaded, unpacked.
        attentions: by name.
    """

    path: str
    digest: str
    device: str
    target: str | None
    load_s: float
    bytes: int
    attentions: Mapping[str, AttentionStats]

    @property
    def calls(self) -> int:
        """Calls of forward, of all attentions."""
        return sum(sum(stats.forward.values()) for stats in self.attentions.values())

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "calls": self.calls}
