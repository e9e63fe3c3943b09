"""Training steps of a tiny model under two attention implementations, compared.

``python -m tests.integrations.training PACKAGE`` does so under another torch and transformers.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

import aotpack
from aotpack.integrations import transformers as hf
from tests.integrations import models

STEPS = 20


def relative(found: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """||found - expected|| / ||expected||, in float64; the norm counts as ``least`` at least."""
    found, expected = found.detach().double(), expected.detach().double()
    difference, scale = float((found - expected).norm()), max(float(expected.norm()), least)
    return difference if scale == 0 else difference / scale


def with_masks(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as the model must have it: gpt-oss makes no masks of packed positions, but takes them."""
    if model.config.model_type != "gpt_oss" or "position_ids" not in batch:
        return batch
    config, embedded = model.config, model.model.embed_tokens(batch["input_ids"])
    masks = {
        "full_attention": create_causal_mask(config, embedded, None, None, batch["position_ids"]),
        "sliding_attention": create_sliding_window_causal_mask(
            config, embedded, None, None, batch["position_ids"]
        ),
    }
    return {**batch, "attention_mask": masks}


def worst_difference(config: Any, reference: str, batches: Any, steps: int = STEPS) -> float:
    """The largest relative difference between aotpack and another attention.

    Of the loss, of the logits at real positions and of every weight's gradient, over some steps of training.

    Args:
        config: of the model.
        reference: the other attention.
        batches: makes the batch of a seed.
        steps: of gradient descent, for each model by its own gradients.
    """
    pair = [models.made(config, name) for name in ("aotpack", reference)]
    worst = 0.0
    for step in range(steps):
        batch = batches(step)
        real = batch["labels"] != -100
        mine, other = (model(**with_masks(model, batch), use_cache=False) for model in pair)
        for output in (mine, other):
            output.loss.backward()
        found = [relative(mine.loss, other.loss), relative(mine.logits[real], other.logits[real])]
        # Rounding of a gradient that is next to nothing is of the size of the others.
        whole = sum(float(w.grad.norm() ** 2) for w in pair[1].parameters() if w.grad is not None) ** 0.5
        for weight, right in zip(*(model.parameters() for model in pair), strict=True):
            assert (weight.grad is None) == (right.grad is None)
            if weight.grad is not None and right.grad is not None:
                found.append(relative(weight.grad, right.grad, 1e-3 * whole))
        worst = max(worst, *found)
        for model in pair:
            with torch.no_grad():
                for weight in model.parameters():
                    if weight.grad is not None:
                        weight -= 0.1 * weight.grad
            model.zero_grad()
    return worst


def main(package: str) -> None:
    (pack,) = hf.register(package, model=models.qwen3(), padded=True, packed=True)
    with aotpack.no_tracing() as watch:
        found = {
            f"{config.model_type} {batches.__name__}": worst_difference(config, reference, batches, steps=2)
            for config, reference in ((models.gemma3(), "sdpa"), (models.gpt_oss(), "eager"))
            for batches in (models.right_padded, models.packed)
        }
    calls = sum(sum(stats.forward.values()) for stats in pack.stats().attentions.values())
    print(
        json.dumps(
            {
                "transformers": transformers.__version__,
                "worst": max(found.values()),
                "traces": watch.count,
                "calls": calls,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
