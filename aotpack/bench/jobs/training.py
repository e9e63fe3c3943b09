"""A whole training step of a DFlash drafter of five layers; only the attention differs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from aotpack.bench.case import Case
from aotpack.bench.jobs.clock import Chain, synchronize
from aotpack.bench.jobs.ways import Way, way
from aotpack.bench.jobs.workload import draw_anchors, read_spec
from aotpack.demo.data import VOCAB_SIZE, Batch
from aotpack.demo.drafter import Drafter, block_loss, block_positions, block_tokens, drafter_config
from aotpack.spec import AttentionSpec

__all__ = ["train"]

_LAYERS: Final = 5


def train(
    case: Case, who: str, artifacts: str | None = None, keep_artifacts: bool = False
) -> tuple[dict[str, Any], Callable[[], dict[str, float]]]:
    """Seconds of the first step, with all that the attention needs, once; then of a step.

    Everything but the attention is warm: the trainer has made a step with a stand-in for it.

    Args:
        case: lengths of every step.
        who: makes the attention.
        artifacts: file of ``torch.compiler.save_cache_artifacts``; loaded first where it exists.
        keep_artifacts: write it, after the clock of the first step has stopped.
    """
    trainer = _Trainer(case)
    trainer.step(_StandIn(trainer.spec), *trainer.draw())
    drawn = [trainer.draw()]
    synchronize(case.device)
    start = time.perf_counter()
    if artifacts and Path(artifacts).exists():
        torch.compiler.load_cache_artifacts(Path(artifacts).read_bytes())
    attend = way(who, case)
    trainer.step(attend, *drawn[-1])
    synchronize(case.device)
    first = time.perf_counter() - start
    if artifacts and keep_artifacts:
        saved = torch.compiler.save_cache_artifacts()
        assert saved is not None
        Path(artifacts).write_bytes(saved[0])
    chain = Chain((lambda _: trainer.step(attend, *drawn[-1]),), case.device)

    def measure() -> dict[str, float]:
        drawn.append(trainer.draw())
        return {"step": chain.seconds()[0]}

    return {"first": first}, measure


class _StandIn:
    """Next to no attention: it returns q, and gives every input a gradient."""

    def __init__(self, spec: AttentionSpec) -> None:
        self.spec = spec

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> None:
        """None is needed."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: None) -> Tensor:
        return q + k.mean() + v.mean()


class _Trainer:
    """A drafter in the spec's dtype that learns from random tokens and hidden states, and its AdamW."""

    def __init__(self, case: Case) -> None:
        self.case, self.spec = case, read_spec(case)
        hidden, dtype = self.spec.heads * self.spec.head_dim, getattr(torch, self.spec.dtype)
        torch.manual_seed(0)
        config = drafter_config(self.spec, hidden_size=hidden, layers=_LAYERS, target_layers=4 * _LAYERS)
        config.intermediate_size = 3 * hidden
        with torch.device(case.device):
            # Made where they are used, and in their dtype: a large drafter takes long on the CPU.
            self.drafter = Drafter(config).to(dtype)
            self.embedding = nn.Embedding(VOCAB_SIZE, hidden, dtype=dtype).requires_grad_(False)
            shape = (case.batch, case.context)
            tokens = torch.randint(0, VOCAB_SIZE - 1, shape)
            self.batch = Batch(tokens=tokens, loss_mask=torch.ones(shape, dtype=torch.bool))
            self.hidden = torch.randn(*shape, _LAYERS * hidden, dtype=dtype)
        self.optimizer = torch.optim.AdamW(self.drafter.parameters(), lr=1e-4, fused=True)
        self.generator = torch.Generator(case.device).manual_seed(0)

    def draw(self) -> tuple[Tensor, Tensor]:
        """The anchors of a step, which differ from step to step, and keep."""
        return draw_anchors(self.case, self.generator)

    def step(self, attend: Way, anchors: Tensor, keep: Tensor) -> None:
        """Mask, forward, loss, backward and optimizer."""
        context, size = self.case.context, self.spec.mask.block_size or 1
        mask = attend.block_mask(anchors=anchors, keep=keep, context_len=context)
        blocks = self.embedding(block_tokens(self.batch.tokens, anchors, keep, size))
        positions = block_positions(anchors, context, size)
        hidden = self.drafter(blocks, self.hidden, positions, attend, mask)
        block_loss(hidden, self.embedding, self.batch, anchors, keep).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
