"""Train a Qwen3 of transformers on the bytes of a text, with the attention of a package.

    aotpack build --model examples/qwen3-tiny/config.json --padded -o qwen3-tiny.aotpack
    python examples/hf_finetune.py --package qwen3-tiny.aotpack

Two lines make it aotpack's: ``register``, and ``attn_implementation="aotpack"``. Paragraphs are of different
lengths and padded on the right, as a tokenizer does it. Weights are random; nothing is downloaded. No thread
traces or compiles: inside ``no_tracing`` one that did would raise.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from aotpack import no_tracing
from aotpack.demo.example import exit_codes
from aotpack.integrations import transformers as hf

SCHEMA = "aotpack.example.finetune/1"
ROOT = Path(__file__).resolve().parents[1]
CONFIG = Path(__file__).parent / "qwen3-tiny" / "config.json"
IGNORED = -100


def paragraphs(text: bytes, longest: int) -> list[bytes]:
    """The paragraphs of a text that are worth a row, cut at ``longest`` bytes."""
    return [part[:longest] for part in text.split(b"\n\n") if len(part) > 40]


def collate(rows: Sequence[bytes], device: str) -> dict[str, Tensor]:
    """A right-padded batch: input_ids, attention_mask and labels, int64 [B, L]."""
    length = max(map(len, rows))
    ids = torch.tensor([list(row) + [0] * (length - len(row)) for row in rows], device=device)
    real = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=device)
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, IGNORED)}


def train(options: argparse.Namespace) -> list[float]:
    """The loss of each step, in nats per byte."""
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(options.config)
    hf.register(options.package, model=config, padded=True, device=options.device)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="aotpack").to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rows, draw = paragraphs(options.text.read_bytes(), options.longest), random.Random(0)
    losses = []
    for step in range(options.steps):
        loss = model.train()(**collate(draw.sample(rows, options.batch), options.device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step + 1:3}  loss {losses[-1]:.3f}", file=sys.stderr)
    return losses


def main() -> None:
    """Train as the command line says."""
    parser = argparse.ArgumentParser(description="Train a Qwen3 of transformers on a package's attention.")
    parser.add_argument("--package", required=True, help="what aotpack.load takes")
    parser.add_argument("--config", default=CONFIG, type=Path, help="of the model")
    parser.add_argument("--text", default=ROOT / "README.md", type=Path, help="what to train on")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", default=30, type=int)
    parser.add_argument("--batch", default=4, type=int)
    parser.add_argument("--longest", default=300, type=int, help="bytes of a paragraph")
    parser.add_argument("--json", action="store_true", help="one object on stdout")
    options = parser.parse_args()
    with exit_codes(), no_tracing() as watch:
        losses = train(options)
    if options.json:
        print(json.dumps({"schema": SCHEMA, "losses": losses, "traces": watch.count}, indent=2))
    else:
        print(f"{options.steps} steps: loss {losses[0]:.3f} to {losses[-1]:.3f}, {watch.count} traces")


if __name__ == "__main__":
    main()
