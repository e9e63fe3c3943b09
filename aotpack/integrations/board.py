"""Where the ranks of a process group leave each other notes: the group's own store.

The only module that touches ``torch.distributed.distributed_c10d._get_process_group_store``; tried with torch
2.11.0 and 2.14.1. Notes are JSON.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from aotpack.errors import HostError

__all__ = ["Board", "RankError"]

_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.2
_FAREWELL_SECONDS: Final = 5.0

_lock: Final = threading.Lock()
_boards: Final[Counter[str]] = Counter()


class RankError(HostError):
    """What the other ranks waited for did not come: the message says of which rank, and why."""


class Board:
    """The notes of one meeting of all ranks of a group. Every rank makes its boards in the same order.

    Args:
        what: the ranks do, for messages.
        group: of the ranks; the default group where it is None.
        timeout: seconds that a rank waits for the others, from now on.

    Attributes:
        rank: of this process, in the group.
        size: of the group.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None, timeout: float) -> None:
        group = group or c10d._get_default_group()
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._what = what
        self._timeout = timeout
        self._end = time.monotonic() + timeout
        name = group.group_name
        with _lock:
            _boards[name] += 1
            number = _boards[name]
        store = c10d._get_process_group_store(group)
        self._store = dist.PrefixStore(f"aotpack/{number}", store)  # type: ignore[attr-defined]

    def put(self, key: str, note: Any) -> None:
        """Leaves this rank's note."""
        self._ask("set", f"{key}/{self.rank}", json.dumps(note))

    def get(self, key: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """The notes of these ranks, or of all, once they are all there.

        Raises:
            RankError: a rank failed, or some did not come in time; the message names them.
        """
        wanted = [f"{key}/{rank}" for rank in (range(self.size) if ranks is None else ranks)]
        pause = _FIRST_PAUSE
        while not self._ask("check", wanted):
            self._raise_failure()
            if time.monotonic() > self._end:
                raise self._late(wanted)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return [json.loads(self._ask("get", name)) for name in wanted]

    def fail(self, error: BaseException) -> None:
        """Tells the others, who raise ``RankError``, that this rank failed, and why; the first is heard.

        Waits a moment for them to hear it: the store may end with this process.
        """
        note = {"rank": self._ranks[self.rank], "error": f"{type(error).__name__}: {error}"}
        with contextlib.suppress(RankError):
            if self._ask("add", "failures", 1) == 1:
                self._ask("set", "failed", json.dumps(note))
            self.put("heard", True)
            end, everyone = time.monotonic() + _FAREWELL_SECONDS, [f"heard/{r}" for r in range(self.size)]
            while time.monotonic() < end and not self._ask("check", everyone):
                time.sleep(_LONGEST_PAUSE / 4)

    def _raise_failure(self) -> None:
        if self._ask("check", ["failed"]):
            note = json.loads(self._ask("get", "failed"))
            self.put("heard", True)
            raise RankError(
                f"rank {note['rank']} failed in {self._what}, which all ranks need",
                found=note["error"].replace("\n", "\n    "),
                remedy=f"mend what rank {note['rank']} says, and start all ranks again",
            )

    def _late(self, wanted: Sequence[str]) -> RankError:
        missing = [int(name.rpartition("/")[2]) for name in wanted if not self._ask("check", [name])]
        ranks = ", ".join(str(self._ranks[rank]) for rank in missing)
        return RankError(
            f"rank {ranks} did not come in {self._what}",
            expected=f"a note of that rank within {self._timeout:g} s",
            found="none: it was killed, it hangs, or it does not call aotpack in the same order",
            remedy="look at that rank's output; give a longer timeout where a fetch may take longer",
        )

    def _ask(self, call: str, *args: Any) -> Any:
        try:
            return getattr(self._store, call)(*args)
        except RuntimeError as error:
            raise RankError(
                f"the store of the process group does not answer in {self._what}",
                expected="the process that holds it, mostly rank 0, to live",
                found=str(error).splitlines()[0],
                remedy="look at the output of that rank: it was probably killed",
            ) from error
