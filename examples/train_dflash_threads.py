"""Train a small DFlash drafter from several threads of one process, on a compiled package.

    python examples/train_dflash_threads.py --threads 3 --device cpu
    python examples/train_dflash_threads.py --package qwen3.aotpack --device cuda:0,cuda:1 --json

Each thread has a replica of the drafter, its own text and its own anchors, and so its own lengths at
every step; gradients are averaged and all replicas stay equal to the bit. No thread traces or compiles:
inside ``no_tracing`` one that did would raise.

The model, the text and the averaging are in ``aotpack/demo``; what a trainer writes is ``step_loss``.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from aotpack import no_tracing
from aotpack.demo.data import Batch
from aotpack.demo.drafter import Attend, Drafter, Target, block_loss, block_positions, block_tokens
from aotpack.demo.example import exit_codes, package_here
from aotpack.demo.train import STEPS, TrainResult, train

SCHEMA = "aotpack.example.train/1"
CONFIG = Path(__file__).parent / "qwen2.5-0.5b-dflash" / "config.json"


def step_loss(
    drafter: Drafter, target: Target, attend: Attend, batch: Batch, anchors: Tensor, keep: Tensor
) -> Tensor:
    """Loss of one thread's step.

    ``attend`` is ``aotpack.load(package, device=device).attention("full")``, one for all threads of a
    device. Every layer of the drafter calls ``attend(q, k, v, mask)``; to compare with other math, give
    the drafter another callable of that shape.

    Args:
        drafter: this thread's replica.
        target: frozen; its hidden states are the drafter's context.
        attend: the compiled attention.
        batch: tokens and loss_mask, [B, S].
        anchors: int64 [B, N]; N and S change from step to step.
        keep: bool [B, N].
    """
    context_len = batch.tokens.shape[1]
    block_size = attend.spec.mask.block_size or 1
    mask = attend.block_mask(anchors=anchors, keep=keep, context_len=context_len)
    blocks = target.embedding(block_tokens(batch.tokens, anchors, keep, block_size))
    positions = block_positions(anchors, context_len, block_size)
    hidden = drafter(blocks, target(batch.tokens), positions, attend, mask)
    return block_loss(hidden, target.embedding, batch, anchors, keep)


def report(result: TrainResult, traces: int) -> str:
    """The run in a few lines."""
    return "\n".join(
        [
            f"loss         {result.first_loss:.3f} -> {result.last_loss:.3f}, {result.fall:.0%} less",
            f"load         {result.load_ms:.0f} ms",
            f"first step   {result.first_step_ms:.0f} ms",
            f"{len(result.losses)} steps     {result.seconds:.1f} s, {result.cpu_seconds:.1f} s of CPU time",
            f"threads      {result.threads} on {', '.join(dict.fromkeys(result.devices))}",
            f"traces       {traces}",
        ]
    )


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, help="a package with a spec 'full'; built when not given")
    parser.add_argument("--threads", type=int, default=3, help="drafter threads (default 3)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps (default {STEPS})")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, or several: cuda:0,cuda:1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()

    def show(step: int, loss: float) -> None:
        print(f"step {step:3}  loss {loss:.3f}", file=sys.stderr)

    devices = options.device.split(",")
    kinds = sorted({device.partition(":")[0] for device in devices})
    with exit_codes():
        package = options.package or package_here(CONFIG, CONFIG.parent.name, *kinds)
        with no_tracing() as watch:
            result = train(package, options.threads, options.steps, devices, show, loss=step_loss)
    if options.json:
        print(json.dumps({"schema": SCHEMA, **asdict(result), "traces": watch.count}, indent=2))
    else:
        print(report(result, watch.count))


if __name__ == "__main__":
    main()
