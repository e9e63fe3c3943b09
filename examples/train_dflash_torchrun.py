"""Train a small DFlash drafter in several processes, with DDP or FSDP2, on a compiled package.

    torchrun --nproc-per-node 2 examples/train_dflash_torchrun.py --strategy ddp
    torchrun --nproc-per-node 2 examples/train_dflash_torchrun.py --strategy fsdp2 --package qwen3.aotpack
    python examples/train_dflash_torchrun.py --shards 2 --json

Each process takes its own GPU with NCCL, or the CPU with gloo. The data comes in shards, each with its own
lengths at every step; by default there is one for each process. One process that takes the shards of two
trains the same: its losses are equal.

The model and the text are in ``aotpack/demo``; what a trainer writes is in ``main``, ``wrapped`` and
``step_loss``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from aotpack import Attention, no_tracing
from aotpack.demo.data import Batch, Corpus, sample_anchors
from aotpack.demo.drafter import (
    Drafter,
    Target,
    block_loss,
    block_positions,
    block_tokens,
    drafter_config,
    target_layer_ids,
)
from aotpack.demo.example import exit_codes, package_here
from aotpack.demo.train import Settings
from aotpack.integrations import distributed

SCHEMA = "aotpack.example.torchrun/1"
CONFIG = Path(__file__).parent / "qwen2.5-0.5b-dflash" / "config.json"


def step_loss(
    drafter: nn.Module, target: Target, attend: Attention, batch: Batch, anchors: Tensor, keep: Tensor
) -> Tensor:
    """Loss of one shard's step.

    Args:
        drafter: wrapped; it is called, so that DDP's and FSDP2's hooks run.
        target: frozen; its hidden states are the drafter's context.
        attend: the compiled attention of this process's device.
        batch: tokens and loss_mask, [B, S].
        anchors: int64 [B, N]; N and S differ from shard to shard and from step to step.
        keep: bool [B, N].
    """
    context_len = batch.tokens.shape[1]
    block_size = attend.spec.mask.block_size or 1
    mask = attend.block_mask(anchors=anchors, keep=keep, context_len=context_len)
    blocks = target.embedding(block_tokens(batch.tokens, anchors, keep, block_size))
    positions = block_positions(anchors, context_len, block_size)
    hidden = drafter(blocks, target(batch.tokens), positions, attend, mask)
    return block_loss(hidden, target.embedding, batch, anchors, keep)


def wrapped(drafter: Drafter, strategy: str, device: torch.device) -> nn.Module:
    """The drafter under DDP or FSDP2, over all processes."""
    if strategy == "ddp":
        return DistributedDataParallel(drafter, device_ids=None if device.type == "cpu" else [device])
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in drafter.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(drafter, mesh=mesh)


def models(attend: Attention, settings: Settings) -> tuple[Target, Drafter]:
    """A target and a drafter with random weights, the same in every process."""
    layer_ids = target_layer_ids(settings.target_layers, settings.layers)
    config = drafter_config(
        attend.spec,
        hidden_size=settings.hidden_size,
        layers=settings.layers,
        target_layers=settings.target_layers,
    )
    torch.manual_seed(settings.seed)
    target = Target(hidden_size=settings.hidden_size, layers=settings.target_layers, layer_ids=layer_ids)
    return target.to(attend.device), Drafter(config).to(attend.device)


class Shard:
    """One part of the data: its text, lengths and anchors depend on its number alone."""

    def __init__(self, number: int, corpus: Corpus, settings: Settings) -> None:
        self.corpus, self.settings = corpus, settings
        self.generator = torch.Generator().manual_seed(settings.seed + 1 + number)

    def draw(self, device: torch.device) -> tuple[Batch, Tensor, Tensor]:
        """The batch of the next step, its anchors int64 [B, N] and keep bool [B, N]."""
        length, slots = (
            int(torch.randint(low, high + 1, (), generator=self.generator))
            for low, high in (self.settings.context, self.settings.anchors)
        )
        batch = self.corpus.batch(self.settings.rows, length, self.generator).to(device)
        return batch, *sample_anchors(batch.loss_mask, slots, self.generator)


class Trainer:
    """This process's share of the training."""

    def __init__(self, attend: Attention, strategy: str, shards: Sequence[int], settings: Settings) -> None:
        self.attend = attend
        self.target, drafter = models(attend, settings)
        self.drafter = wrapped(drafter, strategy, attend.device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=settings.learning_rate)
        corpus = Corpus.of_standard_library()
        self.shards = [Shard(number, corpus, settings) for number in shards]

    def step(self) -> float:
        """One optimizer step over all shards of all processes; their mean loss."""
        self.optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self.attend.device)
        for shard in self.shards:
            batch = shard.draw(self.attend.device)
            loss = step_loss(self.drafter, self.target, self.attend, *batch) / len(self.shards)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()


def join(device: str | None) -> None:
    """The process group that torchrun describes, or one of this process alone."""
    on_cuda = torch.cuda.is_available() and device != "cpu"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("nccl" if on_cuda else "gloo", **alone)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Load, train, and what came of it; the same in every process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shards = options.shards or world
    if shards % world:
        sys.exit(f"{shards} shards cannot be shared out among {world} processes")
    kind = "cpu" if dist.get_backend() == "gloo" else "cuda"
    package = options.package or package_here(CONFIG, CONFIG.parent.name, kind, build=rank == 0)
    start = time.perf_counter()
    pack = distributed.load(package, device=options.device)
    load_s = time.perf_counter() - start
    if pack.device.type == "cuda":
        torch.cuda.set_device(pack.device)
    trainer = Trainer(pack.attention("full"), options.strategy, range(rank, shards, world), Settings())
    losses = []
    with no_tracing() as watch:
        with distributed.first_step(device=pack.device) as first:
            losses.append(trainer.step())
        while len(losses) < options.steps:
            losses.append(trainer.step())
            if rank == 0:
                print(f"step {len(losses) - 1:3}  loss {losses[-1]:.3f}", file=sys.stderr)
    return {
        "schema": SCHEMA,
        "strategy": options.strategy,
        "processes": world,
        "device": str(pack.device),
        "shards": shards,
        "losses": losses,
        "load_s": round(load_s, 3),
        "first_step_s": [round(seconds, 3) for seconds in first.seconds],
        "traces": watch.count,
        "calls": pack.stats().calls,
    }


def report(result: dict[str, Any]) -> str:
    """The run in a few lines."""
    losses, first = result["losses"], result["first_step_s"]
    return "\n".join(
        [
            f"loss         {losses[0]:.3f} -> {losses[-1]:.3f} in {len(losses)} steps",
            f"strategy     {result['strategy']}, {result['processes']} processes, {result['shards']} shards",
            f"load         {result['load_s']:.3f} s",
            f"first step   {', '.join(f'rank {rank} {seconds:.3f} s' for rank, seconds in enumerate(first))}",
            f"traces       {result['traces']}",
        ]
    )


def main() -> None:
    """Parse the command line, train, print from the first process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", help="a package with a spec 'full'; built when not given")
    parser.add_argument("--strategy", choices=["ddp", "fsdp2"], default="ddp")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--shards", type=int, help="parts of the data (default: one for each process)")
    parser.add_argument(
        "--device", choices=["cpu"], help="by default a GPU for each process, if there are any"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    join(options.device)
    try:
        with exit_codes():
            result = train(options)
    finally:
        dist.destroy_process_group()
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(result, indent=2) if options.json else report(result))


if __name__ == "__main__":
    main()
