"""Train on a mask rule and a score rule of your own, compiled into a package.

    python examples/own_mask.py
    aotpack build examples/own_mask.toml --target cpu -o own-mask.aotpack
    python examples/own_mask.py --package own-mask.aotpack --json

The rules are the functions in ``own_rules.py``, named by ``own_mask.toml``: attention within packed documents
that keeps each document's first tokens, and a bias for each pair of kinds of tokens that is trained with the
model. Lengths differ from step to step. Nothing is traced or compiled: inside ``no_tracing`` it would raise.
At the end the compiled rules, and every gradient, are compared with dense fp64 math.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from own_rules import KINDS, streaming, told_apart
from torch import Tensor, nn
from torch.nn import functional

import aotpack
from aotpack import Attention, AttentionSpec, BlockMask, no_tracing
from aotpack.demo.data import VOCAB_SIZE, Corpus
from aotpack.demo.example import exit_codes, package_here
from aotpack.dense import dense_attention
from aotpack.drafter import specs_from_config

SCHEMA = "aotpack.example.own/1"
SPEC = Path(__file__).parent / "own_mask.toml"
ROWS, DOCUMENTS, LENGTHS = 2, 3, (128, 320)
# Letters, digits, spaces, other ASCII, all else.
KIND_OF_BYTE = torch.tensor(
    [
        0 if c.isalpha() else 1 if c.isdigit() else 2 if c.isspace() else 3 if c.isascii() else 4
        for c in map(chr, range(VOCAB_SIZE))
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Rows of several documents each, without padding.

    Attributes:
        tokens: int64 [B, L].
        document: int64 [B, L], the number of each token's document in its row.
        place: int64 [B, L], of each token in its document.
        kind: int64 [B, L], letters, digits and so on.
    """

    tokens: Tensor
    document: Tensor
    place: Tensor
    kind: Tensor

    @classmethod
    def draw(cls, corpus: Corpus, generator: torch.Generator) -> Packed:
        """Documents of random lengths in rows of one random length."""
        length = int(torch.randint(*LENGTHS, (), generator=generator))
        rows = []
        for _ in range(ROWS):
            cuts = 1 + torch.randperm(length - 1, generator=generator)[: DOCUMENTS - 1].sort().values
            sizes = torch.tensor([0, *cuts, length]).diff().tolist()
            texts = [corpus.batch(1, size, generator).tokens[0] for size in sizes]
            numbers = [torch.full((size,), number) for number, size in enumerate(sizes)]
            places = [torch.arange(size) for size in sizes]
            rows.append([torch.cat(part) for part in (texts, numbers, places)])
        tokens, document, place = (torch.stack(part) for part in zip(*rows, strict=True))
        return cls(tokens=tokens, document=document, place=place, kind=KIND_OF_BYTE[tokens])

    def to(self, device: torch.device) -> Packed:
        """The same rows on another device."""
        return Packed(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})


class Model(nn.Module):
    """A language model of one layer, over bytes; heads and sizes are those of the spec."""

    def __init__(self, spec: AttentionSpec, hidden_size: int = 128) -> None:
        super().__init__()
        self.heads = (spec.heads, spec.kv_heads, spec.kv_heads)
        self.embedding = nn.Embedding(VOCAB_SIZE, hidden_size)
        self.projections = nn.ModuleList(
            nn.Linear(hidden_size, heads * spec.head_dim, bias=False) for heads in self.heads
        )
        self.output = nn.Linear(spec.heads * spec.value_dim, hidden_size, bias=False)
        self.mlp = nn.Sequential(
            nn.RMSNorm(hidden_size), nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(),
            nn.Linear(4 * hidden_size, hidden_size),
        )  # fmt: skip
        self.norms = nn.ModuleList(nn.RMSNorm(hidden_size) for _ in range(2))
        self.head = nn.Linear(hidden_size, VOCAB_SIZE)
        self.table = nn.Parameter(torch.zeros(spec.heads, KINDS, KINDS))

    def forward(self, packed: Packed, attend: Attention, mask: BlockMask) -> Tensor:
        """Logits of each token's next one, [B, L, VOCAB_SIZE]."""
        hidden = self.embedding(packed.tokens)
        normed = self.norms[0](hidden)
        q, k, v = (
            projection(normed).unflatten(-1, (heads, -1)).transpose(1, 2)
            for projection, heads in zip(self.projections, self.heads, strict=True)
        )
        out = attend(q, k, v, mask, kind=packed.kind, table=self.table)
        hidden = hidden + self.output(out.transpose(1, 2).flatten(2))
        return self.head(self.norms[1](hidden + self.mlp(hidden)))


def step_loss(model: Model, attend: Attention, packed: Packed) -> Tensor:
    """Mean cross-entropy of the tokens that follow one of their own document."""
    mask = attend.block_mask(document=packed.document, place=packed.place, query_len=packed.tokens.shape[1])
    logits = model(packed, attend, mask)[:, :-1]
    inside = packed.document[:, 1:] == packed.document[:, :-1]
    return functional.cross_entropy(logits[inside], packed.tokens[:, 1:][inside])


def errors_from_dense_math(attend: Attention, packed: Packed, table: Tensor) -> dict[str, float]:
    """||x - exact|| / ||exact|| of the output and of the gradients of q, k, v and the table.

    "exact" calls the two rules on every cell, in fp64.
    """
    spec, (batch, length) = attend.spec, packed.tokens.shape
    b, h, q_idx, kv_idx = torch.meshgrid(
        *(torch.arange(n, device=attend.device) for n in (batch, spec.heads, length, length)),
        indexing="ij",
    )
    visible = streaming(b, h, q_idx, kv_idx, packed.document, packed.place)

    def exact(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        def modify(score: Tensor) -> Tensor:
            return told_apart(score, b, h, q_idx, kv_idx, packed.kind, table)

        return dense_attention(q, k, v, visible, spec.scale, modify=modify)[0]

    def compiled(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        mask = attend.block_mask(document=packed.document, place=packed.place, query_len=length)
        return attend(q, k, v, mask, kind=packed.kind, table=table)

    heads = (spec.heads, spec.kv_heads, spec.kv_heads)
    values = [torch.randn(batch, n, length, spec.head_dim, device=attend.device) for n in heads]
    values.append(table.detach())
    grad_out = torch.randn_like(values[0])

    def results(attention: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [value.to(dtype, copy=True).requires_grad_() for value in values]
        out = attention(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.to(dtype))]

    pairs = zip(results(compiled, torch.float32), results(exact, torch.float64), strict=True)
    relative = [float((found.double() - right).norm() / right.norm()) for found, right in pairs]
    return dict(zip(("out", "dq", "dk", "dv", "dtable"), relative, strict=True))


def train(package: Path, steps: int, device: str) -> dict[str, Any]:
    """Load, train, compare, and what came of it."""
    torch.manual_seed(0)
    start = time.perf_counter()
    # With specs, a package that was built from other rules than those in own_rules.py is refused.
    attend = aotpack.load(package, device, specs=specs_from_config(SPEC)).attention("own")
    load_s = time.perf_counter() - start
    model = Model(attend.spec).to(attend.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    corpus, generator = Corpus.of_standard_library(), torch.Generator().manual_seed(0)
    losses: list[float] = []
    first_step_s = 0.0
    for step in range(steps):
        packed = Packed.draw(corpus, generator).to(attend.device)
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = step_loss(model, attend, packed)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        first_step_s = first_step_s or time.perf_counter() - start
        print(f"step {step:3}  loss {losses[-1]:.3f}", file=sys.stderr)
    return {
        "losses": losses,
        "first_loss": fmean(losses[:3]),
        "last_loss": fmean(losses[-3:]),
        "load_ms": round(1e3 * load_s, 1),
        "first_step_ms": round(1e3 * first_step_s, 1),
        "largest_bias": float(model.table.detach().abs().max()),
        "errors": errors_from_dense_math(
            attend, Packed.draw(corpus, generator).to(attend.device), model.table
        ),
    }


def report(result: dict[str, Any]) -> str:
    """The run in a few lines."""
    errors = ", ".join(f"{name} {error:.1e}" for name, error in result["errors"].items())
    return "\n".join(
        [
            f"loss         {result['first_loss']:.3f} -> {result['last_loss']:.3f}",
            f"load         {result['load_ms']:.0f} ms",
            f"first step   {result['first_step_ms']:.0f} ms",
            f"table        learnt biases up to {result['largest_bias']:.2f}",
            f"traces       {result['traces']}",
            f"from fp64    {errors}",
        ]
    )


def main() -> None:
    """Parse the command line, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--package", type=Path, help="built from own_mask.toml; built here when not given")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps (default 40)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with exit_codes():
        package = options.package or package_here(SPEC, "own-mask", options.device)
        with no_tracing() as watch:
            result = train(package, options.steps, options.device)
    result = {"schema": SCHEMA, **result, "traces": watch.count}
    print(json.dumps(result, indent=2) if options.json else report(result))


if __name__ == "__main__":
    main()
