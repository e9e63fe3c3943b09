"""Train a small EAGLE-3 drafter through its test-time unroll, on a compiled package.

    python examples/eagle3_unroll.py
    python examples/eagle3_unroll.py --package eagle3.aotpack --threads 2 --json

One layer drafts seven tokens for every token of a text, each from its own hidden state of the step before.
Step k attends over the keys of all steps up to it, [B,Hk,(k+1)*Q,D], and gradients flow back through all of
them. Lengths differ from batch to batch; one package serves them all. No thread traces or compiles: inside
``no_tracing`` one that did would raise.

What a trainer writes is ``unrolled_loss``. The text, the frozen target with its random weights and the mean
of the threads' gradients are in ``aotpack/demo``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from threading import BrokenBarrierError
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RotaryEmbedding,
    apply_rotary_pos_emb,
)

import aotpack
from aotpack import Attention, AttentionSpec, no_tracing
from aotpack.demo.averaging import GradientMean
from aotpack.demo.data import Batch, Corpus
from aotpack.demo.drafter import Target, drafter_config
from aotpack.demo.example import exit_codes, package_here

SCHEMA = "aotpack.example.eagle3/1"
CONFIG = Path(__file__).parent / "eagle3-small" / "config.json"
UNROLL, DECAY = 7, 0.8
TARGET_LAYERS = 6
LISTENED = [1, 2, 4]  # a low, a middle and a high layer of the target
HIDDEN = 256
ROWS, LENGTHS = 2, (64, 160)


class Drafter(nn.Module):
    """EAGLE-3's one layer: it attends over embeddings and hidden states side by side.

    Args:
        spec: heads and sizes of its attention.
        hidden_size: of the target, and so of the drafter.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int = HIDDEN) -> None:
        super().__init__()
        config = drafter_config(spec, hidden_size=hidden_size, layers=1, target_layers=TARGET_LAYERS)
        self.spec = spec
        self.fc = nn.Linear(len(LISTENED) * hidden_size, hidden_size, bias=False)
        self.embedding_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.q_proj = nn.Linear(2 * hidden_size, spec.heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, spec.kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, spec.kv_heads * spec.value_dim, bias=False)
        self.o_proj = nn.Linear(spec.heads * spec.value_dim, hidden_size, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.mlp = Qwen3MLP(config)
        self.norm = nn.RMSNorm(hidden_size, eps=1e-6)
        self.rotary = Qwen3RotaryEmbedding(config)

    def qkv(self, embedded: Tensor, hidden: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,H,Q,D], k [B,Hk,Q,D] and v [B,Hk,Q,Dv] of one step, in the spec's dtype."""
        both = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], dim=-1)
        q, k, v = (
            proj(both).unflatten(-1, (heads, -1)).transpose(1, 2)
            for proj, heads in (
                (self.q_proj, self.spec.heads),
                (self.k_proj, self.spec.kv_heads),
                (self.v_proj, self.spec.kv_heads),
            )
        )
        # Row i of step k stands for the token k places on.
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None] + step
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(hidden, positions))
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def close(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """The step's hidden states [B,Q,hidden] from those it began with and the attention's output."""
        hidden = hidden + self.o_proj(attended.to(hidden.dtype).transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.mlp_norm(hidden))


def unrolled_loss(drafter: Drafter, target: Target, attend: Attention, batch: Batch) -> Tensor:
    """Loss of one batch: the sum over the steps of ``DECAY**k`` times step k's mean cross-entropy.

    Row i of step k reads the text's token i + 1 + k and predicts the next one. The last rows run out of text
    one by one, so a step's lengths are one less than those of the step before. Labels are the text's own
    tokens: a target with random weights has no distribution that is worth learning.

    Args:
        drafter: in training.
        target: frozen; three of its layers' hidden states begin the unroll.
        attend: the compiled attention, or anything called the same way.
        batch: tokens and loss_mask, [B, Q].
    """
    query_len = batch.tokens.shape[1]
    lengths = text_lengths(batch.loss_mask) - 2
    hidden = drafter.fc(target(batch.tokens))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = hidden.new_zeros(())
    for step in range(UNROLL):
        q, k, v = drafter.qkv(target.embedding(ahead(batch.tokens, step + 1)), hidden, step)
        keys.append(k)
        values.append(v)
        mask = attend.block_mask(
            lengths=(lengths - step).clamp(min=0), query_len=query_len, context_len=(step + 1) * query_len
        )
        hidden = drafter.close(hidden, attend(q, torch.cat(keys, dim=2), torch.cat(values, dim=2), mask))
        logits = functional.linear(drafter.norm(hidden), target.embedding.weight)
        labels, counted = ahead(batch.tokens, step + 2), ahead(batch.loss_mask, step + 2)
        total = total + DECAY**step * functional.cross_entropy(logits[counted], labels[counted])
    return total


def ahead(x: Tensor, places: int) -> Tensor:
    """Row i gets what row i + places has, and zero past the end: [B, Q] to [B, Q]."""
    return functional.pad(x[:, places:], (0, places))


def text_lengths(loss_mask: Tensor) -> Tensor:
    """Tokens of each row up to its padding: bool [B, Q] to int64 [B]."""
    return (loss_mask * torch.arange(1, loss_mask.shape[1] + 1, device=loss_mask.device)).amax(dim=1)


class Worker:
    """One thread's replica of the drafter, and its own text. Replicas start equal."""

    def __init__(self, rank: int, attend: Attention, corpus: Corpus) -> None:
        torch.manual_seed(0)
        self.target = Target(hidden_size=HIDDEN, layers=TARGET_LAYERS, layer_ids=LISTENED).to(attend.device)
        self.drafter = Drafter(attend.spec).to(attend.device)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-3)
        self.rank, self.attend, self.corpus = rank, attend, corpus
        self.generator = torch.Generator().manual_seed(rank)
        self.first_step_s = 0.0

    def run(self, steps: int, mean: GradientMean) -> None:
        """Every step a batch of a new length, then everyone's mean gradient."""
        start = time.perf_counter()
        try:
            for step in range(steps):
                length = int(torch.randint(*LENGTHS, (), generator=self.generator))
                batch = self.corpus.batch(ROWS, length, self.generator).to(self.attend.device)
                self.optimizer.zero_grad()
                loss = unrolled_loss(self.drafter, self.target, self.attend, batch)
                loss.backward()
                mean.average(self.rank, loss.item())
                self.optimizer.step()
                if step == 0:
                    self.first_step_s = time.perf_counter() - start
        except BaseException:
            mean.abort()
            raise


def train(package: Path, threads: int, steps: int, device: str) -> dict[str, Any]:
    """Load, train from so many threads, and what came of it."""
    start = time.perf_counter()
    pack = aotpack.load(package, device)
    attend = pack.attention("eagle3")  # one for all threads
    load_s = time.perf_counter() - start
    corpus = Corpus.of_standard_library()
    workers = [Worker(rank, attend, corpus) for rank in range(threads)]
    mean = GradientMean([worker.drafter for worker in workers], show)
    each = max(1, (os.cpu_count() or 1) // threads)
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(each,)) as pool:
        futures = [pool.submit(worker.run, steps, mean) for worker in workers]
    errors = [error for future in futures if (error := future.exception()) is not None]
    # What went wrong in one thread comes before its echo in the others.
    for error in sorted(errors, key=lambda error: isinstance(error, BrokenBarrierError)):
        raise error
    return {
        "threads": threads,
        "device": str(pack.device),
        "unroll": UNROLL,
        "losses": mean.losses,
        "first_loss": fmean(mean.losses[:3]),
        "last_loss": fmean(mean.losses[-3:]),
        "load_ms": round(1e3 * load_s, 1),
        "first_step_ms": round(1e3 * max(worker.first_step_s for worker in workers), 1),
        "calls": pack.stats().calls,
    }


def show(step: int, loss: float) -> None:
    """One line on stderr."""
    print(f"step {step:3}  loss {loss:.3f}", file=sys.stderr)


def report(result: dict[str, Any]) -> str:
    """The run in a few lines."""
    first, last = result["first_loss"], result["last_loss"]
    return "\n".join(
        [
            f"loss         {first:.3f} -> {last:.3f}, summed over {result['unroll']} steps of an unroll",
            f"load         {result['load_ms']:.0f} ms",
            f"first step   {result['first_step_ms']:.0f} ms",
            f"threads      {result['threads']} on {result['device']}",
            f"traces       {result['traces']}",
        ]
    )


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, help="a package with a spec 'eagle3'; built when not given")
    parser.add_argument("--threads", type=int, default=1, help="drafter threads (default 1)")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default 20)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with exit_codes():
        package = options.package or package_here(CONFIG, CONFIG.parent.name, options.device)
        with no_tracing() as watch:
            result = train(package, options.threads, options.steps, options.device)
    result = {"schema": SCHEMA, **result, "traces": watch.count}
    print(json.dumps(result, indent=2) if options.json else report(result))


if __name__ == "__main__":
    main()
