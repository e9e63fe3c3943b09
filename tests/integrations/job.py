"""One rank of a job of real processes: runs scenarios in order and prints what each did, a JSON line each.

    python -m tests.integrations.job SCENARIO...

under torchrun, or with RANK, WORLD_SIZE and INIT_METHOD set. PACKAGE, OTHER and DAMAGED name packages.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import aotpack
from aotpack.integrations.distributed import first_step, load

SHORT = timedelta(seconds=4)


def healthy() -> dict[str, Any]:
    pack = load(os.environ["PACKAGE"])
    return {"digest": pack.digest, "device": str(pack.device)}


def two_nodes() -> dict[str, Any]:
    return {"digest": load(os.environ["PACKAGE"], node="even" if dist.get_rank() % 2 == 0 else "odd").digest}


def damaged() -> dict[str, Any]:
    return {"digest": load(os.environ["DAMAGED"]).digest}


def option() -> dict[str, Any]:
    load(os.environ["PACKAGE"], specs=aotpack.load(os.environ["OTHER"]).specs)
    return {}


def last_has_no_device() -> dict[str, Any]:
    last = dist.get_rank() == dist.get_world_size() - 1
    return {"device": str(load(os.environ["PACKAGE"], device="cuda:77" if last else "cpu").device)}


def different() -> dict[str, Any]:
    rank = dist.get_rank()
    return {"digest": load(os.environ["OTHER" if rank else "PACKAGE"], node=f"node{rank}").digest}


def absent() -> dict[str, Any]:
    """The last rank does not come."""
    if dist.get_rank() < dist.get_world_size() - 1:
        load(os.environ["PACKAGE"], timeout=SHORT)
    return {}


def killed() -> dict[str, Any]:
    """The fetching rank is killed while it opens the package."""
    if dist.get_rank() == 0:

        def kill(event: str, args: tuple[Any, ...]) -> None:
            if event == "open" and str(args[0]) == os.environ["PACKAGE"]:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
    load(os.environ["PACKAGE"], timeout=SHORT)
    return {}


def subgroup() -> dict[str, Any]:
    """All ranks but the first load; then the first too, with all."""
    group = dist.new_group(list(range(1, dist.get_world_size())))
    if dist.get_rank() > 0:
        load(os.environ["PACKAGE"], group=group)
        with first_step(group=group) as found:
            pass
        assert len(found.seconds) == dist.get_world_size() - 1
    return {"digest": load(os.environ["PACKAGE"]).digest}


def steps() -> dict[str, Any]:
    attend = load(os.environ["PACKAGE"]).attention("full")
    spec, anchors = attend.spec, 1 + dist.get_rank()
    with first_step() as found:
        mask = attend.block_mask(
            anchors=torch.arange(anchors)[None], keep=torch.ones(1, anchors, dtype=torch.bool), context_len=9
        )
        q, k, v = (
            torch.ones(1, heads, length, size, dtype=getattr(torch, spec.dtype), requires_grad=True)
            for heads, length, size in (
                (spec.heads, 16 * anchors, spec.head_dim),
                (spec.kv_heads, 9 + 16 * anchors, spec.head_dim),
                (spec.kv_heads, 9 + 16 * anchors, spec.value_dim),
            )
        )
        attend(q, k, v, mask).sum().backward()
        dist.all_reduce(q.grad.sum())
    return {"seconds": found.seconds, "spread": found.spread}


def step_fails() -> dict[str, Any]:
    with first_step():
        if dist.get_rank() == 1:
            raise ArithmeticError("loss is nan")
    return {}


def run(rank: int, world: int, init_method: str | None, scenarios: list[str]) -> None:
    if init_method is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method, rank=rank, world_size=world)
    for name in scenarios:
        try:
            said = globals()[name]()
        except Exception as error:  # noqa: BLE001 - printed, and asserted on by the test
            said = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({"scenario": name, "rank": dist.get_rank(), **said}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "SPAWN" in os.environ:
        world = int(os.environ["SPAWN"])
        mp.spawn(run, (world, os.environ["INIT_METHOD"], sys.argv[1:]), nprocs=world)
    else:
        run(
            int(os.environ["RANK"]),
            int(os.environ["WORLD_SIZE"]),
            os.environ.get("INIT_METHOD"),
            sys.argv[1:],
        )
