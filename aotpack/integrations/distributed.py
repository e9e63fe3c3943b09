"""``load`` for all ranks of a ``torch.distributed`` job: one rank a node fetches, the others wait for it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist

import aotpack.runtime
from aotpack.errors import InputError, IntegrityError
from aotpack.integrations.board import Board, RankError
from aotpack.runtime.log import log
from aotpack.runtime.pack import Pack
from aotpack.store import Places

__all__ = ["FirstStep", "RankError", "first_step", "load"]

TIMEOUT: Final = timedelta(minutes=10)


def load(
    source: Places,
    *,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
    node: str | None = None,
    **options: Any,
) -> Pack:
    """``aotpack.load`` in every rank of a group; all ranks call it, and either all get their pack or none.

    The first rank of each node fetches and unpacks into the node's store, and loads; then the others of that
    node load what it unpacked. Without an initialised process group, in a job of one process, it is
    ``aotpack.load``.

    Args:
        source: as in ``aotpack.load``.
        device: of this rank; by default ``cuda:LOCAL_RANK``, or the CPU where torch sees no GPU. Without
            ``LOCAL_RANK`` it is the rank's place on its node.
        group: of the ranks; by default all.
        timeout: how long a rank waits for the others, the fetch included.
        node: the name of this node; by default its host name.
        options: of ``aotpack.load``: specs, on_miss, trust, lock, offline.

    Raises:
        AotpackError: as ``aotpack.load``, in the rank that failed.
        RankError: in the others, with the number of the rank that failed, and its error; or with the numbers
            of the ranks that were not heard of in time.
        IntegrityError: the ranks loaded different packages.
        InputError: several processes, and no process group.
    """
    if not _initialised(group):
        return aotpack.runtime.load(source, _device(device, 0), **options)
    board = Board("aotpack.integrations.distributed.load", group, timeout.total_seconds())
    board.put("node", node or socket.gethostname())
    nodes = board.get("node")
    here = [rank for rank, name in enumerate(nodes) if name == nodes[board.rank]]
    try:
        if board.rank != here[0]:
            board.get("pack", here[:1])
        pack = aotpack.runtime.load(source, _device(device, here.index(board.rank)), **options)
    except RankError:
        raise
    except BaseException as error:
        board.fail(error)
        raise
    board.put("pack", pack.digest)
    _check_equal(board.get("pack"))
    log.info("rank %d of %d on %s: all have their pack", board.rank, board.size, nodes[board.rank])
    return pack


class FirstStep:
    """What ``first_step`` measured.

    Attributes:
        seconds: of each rank's first step, by rank; empty until all are through.
    """

    def __init__(self) -> None:
        self.seconds: tuple[float, ...] = ()

    @property
    def spread(self) -> float:
        """Seconds between the fastest rank and the slowest."""
        return max(self.seconds) - min(self.seconds)


@contextlib.contextmanager
def first_step(
    *,
    device: str | torch.device | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> Iterator[FirstStep]:
    """Measures a block, the first step, in all ranks, and tells each the figures of all.

    Args:
        device: whose work the block starts, which is waited for; by default the current CUDA device, if any.
        group: of the ranks; by default all.
        timeout: how long a rank waits for the others' figures, from the beginning of its own block.

    Yields:
        A ``FirstStep``; its ``seconds`` are there after the block.

    Raises:
        RankError: another rank failed in the block, or is not through in time.
    """
    found = FirstStep()
    board = None
    if _initialised(group):
        board = Board("the first step", group, timeout.total_seconds())
    start = time.perf_counter()
    try:
        yield found
        if torch.cuda.is_available() and (device is None or torch.device(device).type == "cuda"):
            torch.cuda.synchronize(device)
    except BaseException as error:
        if board is not None:
            board.fail(error)
        raise
    mine = time.perf_counter() - start
    if board is None:
        found.seconds = (mine,)
        return
    board.put("seconds", mine)
    found.seconds = tuple(board.get("seconds"))
    every = ", ".join(f"rank {rank} {seconds:.3f} s" for rank, seconds in enumerate(found.seconds))
    log.info("first step: %s", every)


def _initialised(group: dist.ProcessGroup | None) -> bool:
    if group is not None or dist.is_initialized():
        return True
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1":
        raise InputError(
            "there is no process group yet",
            expected="torch.distributed.init_process_group() before this call",
            found=f"WORLD_SIZE={size}, and no group",
            remedy="initialise it first, so that the ranks can wait for each other",
        )
    return False


def _device(device: str | torch.device | None, place: int) -> str | torch.device:
    """What was asked for, or the device of a rank at that place on its node."""
    if device is not None:
        return device
    count = torch.cuda.device_count()
    if count == 0:
        return "cpu"
    said = os.environ.get("LOCAL_RANK", str(place))
    # A launcher may show each process its own device alone.
    index = 0 if count == 1 else int(said) if said.isdecimal() else count
    if index >= count:
        raise InputError(
            "this rank has no device of its own",
            expected=f"LOCAL_RANK from 0 to {count - 1}, torch seeing {count} devices",
            found=said,
            remedy="start one process a device, or pass device=",
        )
    return f"cuda:{index}"


def _check_equal(digests: list[str]) -> None:
    if len(set(digests)) > 1:
        lines = (f"rank {rank} {digest}" for rank, digest in enumerate(digests))
        raise IntegrityError(
            "the ranks loaded different packages",
            expected="one digest",
            found="".join(f"\n    {line}" for line in lines),
            remedy="name one package for all; where it was replaced meanwhile, start all ranks again",
        )
