"""Scored attention on a CUDA device, from a package that was built without one.

    export PYTHONPATH=.                                         in the repository's root: rules are there
    python tests/device/cuda_scores.py specs FILE.json          writes the specs, by name
    python tests/device/cuda_scores.py build PACKAGE [TARGET]   builds them; on a machine that can
    python tests/device/cuda_scores.py run PACKAGE [--device cuda:0] [--json FILE]

``run`` builds nothing: it compares out, lse and every gradient with dense fp32 math and, on a CUDA device,
with torch.compile(flex_attention), prints a table, and exits 1 when a bound is missed. On ``--device cpu`` it
tries itself on the CPU variants. It needs no pytest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import aotpack
from aotpack.dense import dense_attention
from aotpack.masks import Lengths, family_of
from aotpack.own import inputs
from aotpack.scores import family_of as family_of_score
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec, TensorInput

SHAPES: Final = [(1, 2048, 128), (2, 777, 131), (3, 300, 7), (1, 64, 1)]
BLOCK_SIZE: Final = 16
HEADS: Final = {"heads": 8, "kv_heads": 2, "head_dim": 128}
# Relative to fp32 math; atomics and bfloat16 outputs are what is left.
BOUNDS: Final = {"bfloat16": 1.5e-2, "float32": 5e-3, "float16": 3e-3}


@inputs(temperature=TensorInput(name="temperature", dtype="float32", dims=(), gradient=True))
def tempered(
    score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, temperature: Tensor
) -> Tensor:
    """A trained scalar."""
    return score * temperature


def specs() -> dict[str, AttentionSpec]:
    """One spec of each kind of score, under a dflash mask whose rows may be empty."""
    mask = MaskSpec(family="dflash", block_size=BLOCK_SIZE)
    scores = {
        "softcap": ScoreSpec(family="softcap", cap=5.0),
        "alibi": ScoreSpec(family="alibi"),
        "relative": ScoreSpec(family="relative-bias", distance=64),
        "relative-frozen": ScoreSpec(family="relative-bias", distance=64, frozen=True),
        "tempered": ScoreSpec(family="tests.device.cuda_scores:tempered"),
        "bias": ScoreSpec(family="bias"),
        "sinks": ScoreSpec(family="sinks"),
    }
    return {
        name: aotpack.own.resolve(AttentionSpec(**HEADS, dtype="bfloat16", mask=mask, score=score))
        for name, score in scores.items()
    }


def case(attend: aotpack.Attention, batch: int, context: int, count: int) -> dict[str, Any]:
    """Tensors of a step on the attention's device."""
    spec, device = attend.spec, attend.device
    generator = torch.Generator(device).manual_seed(batch * 1000 + context + count)
    query = count * BLOCK_SIZE
    key = context + query

    def draw(*shape: int, dtype: str = spec.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))

    sizes = {"B": batch, "H": spec.heads, "Q": query, "K": key}
    return {
        "q": draw(batch, spec.heads, query, spec.head_dim),
        "k": draw(batch, spec.kv_heads, key, spec.head_dim),
        "v": draw(batch, spec.kv_heads, key, spec.value_dim),
        "grad_out": draw(batch, spec.heads, query, spec.value_dim),
        "grad_lse": draw(batch, spec.heads, query, dtype="float32"),
        "mask": {
            "anchors": torch.randint(0, context, (batch, count), generator=generator, device=device)
            .sort(-1)
            .values,
            # Not the first block: some row has to be there.
            "keep": (torch.rand((batch, count), generator=generator, device=device) < 0.8)
            | (torch.arange(count, device=device) == 0),
            "context_len": context,
        },
        "lengths": Lengths(batch=batch, query=query, key=key),
        "score": {
            given.name: draw(*(sizes.get(axis, axis) for axis in given.dims), dtype=given.dtype)
            for given in family_of_score(spec.score).inputs
        },
    }


def gradients(call: Callable[..., tuple[Tensor, Tensor]], spec: AttentionSpec, made: dict[str, Any], *,
              exact: bool = False) -> dict[str, Tensor]:  # fmt: skip
    """Results of ``call(q, k, v, score tensors)``, by name; ``exact`` computes in float32."""
    dtype = torch.float32 if exact else None
    q, k, v = (made[n].detach().to(dtype or made[n].dtype).requires_grad_() for n in "qkv")
    trained = [given.name for given in family_of_score(spec.score).trained]
    score = {n: t.detach().clone().requires_grad_(n in trained) for n, t in made["score"].items()}
    out, lse = call(q, k, v, score)
    finite = torch.where(lse.isfinite(), made["grad_lse"], 0)
    wanted = [q, k, v, *(score[name] for name in trained)]
    grads = torch.autograd.grad([out, lse], wanted, [made["grad_out"].to(out.dtype), finite])
    names = ("grad.q", "grad.k", "grad.v", *(f"grad.{name}" for name in trained))
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def mask_mod(spec: AttentionSpec, made: dict[str, Any]) -> Callable[..., Tensor]:
    given = {n: made["mask"][n] for n in ("anchors", "keep")}
    rule = family_of(spec.mask).rule(spec.mask, given, made["lengths"])
    return lambda b, h, q, kv: rule(b, q, kv)


def dense(spec: AttentionSpec, made: dict[str, Any]) -> dict[str, Tensor]:
    """Dense float32 math of the whole grid."""
    lengths, device = made["lengths"], made["q"].device
    at = [
        torch.arange(n, device=device).view(shape)
        for n, shape in ((lengths.batch, (-1, 1, 1, 1)), (lengths.query, (-1, 1)), (lengths.key, (1, -1)))
    ]
    visible = mask_mod(spec, made)(at[0], None, at[1], at[2])

    def call(q: Tensor, k: Tensor, v: Tensor, score: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        how = family_of_score(spec.score).for_dense(score, lengths.query, lengths.key)
        return dense_attention(q, k, v, visible, spec.scale, **how)

    return gradients(call, spec, made, exact=True)


def compiled(spec: AttentionSpec, made: dict[str, Any]) -> dict[str, Tensor]:
    """torch.compile(flex_attention), with sinks joined as gpt-oss does it in transformers."""
    lengths, device = made["lengths"], made["q"].device
    mask = create_block_mask(
        mask_mod(spec, made), lengths.batch, None, lengths.query, lengths.key, device=device
    )
    flex, family = torch.compile(flex_attention, dynamic=False), family_of_score(spec.score)

    def call(q: Tensor, k: Tensor, v: Tensor, score: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        modify = None if family.rule is None else family.rule(spec.heads)
        rule = modify and (lambda s, b, h, q, kv: modify(score, s, b, h, q, kv))
        out, lse = flex(q, k, v, score_mod=rule, block_mask=mask, scale=spec.scale, enable_gqa=True,
                        return_lse=True, kernel_options={"FORCE_USE_FLEX_ATTENTION": True})  # fmt: skip
        if family.sinks is None:
            return out, lse
        sinks = score[family.sinks].view(1, -1, 1)
        joined = torch.where(lse.isfinite(), torch.logaddexp(lse.clamp(min=-1e30), sinks), lse)
        share = torch.where(lse.isfinite(), (lse.clamp(min=-1e30) - sinks).sigmoid(), 0)
        return (out.float() * share.unsqueeze(-1)).to(out.dtype), joined

    return gradients(call, spec, made)


def rival(spec: AttentionSpec, made: dict[str, Any]) -> dict[str, Tensor] | None:
    """``compiled``, or None where torch.compile cannot compile it for this device."""
    try:
        return compiled(spec, made)
    except RuntimeError as problem:
        print("torch.compile:", str(problem).strip().partition("\n")[0][:200], flush=True)
        return None
    finally:
        torch.compiler.reset()


def error(found: Tensor, right: Tensor) -> float:
    """Relative error over finite values; infinite unless the others are where they should be."""
    finite = right.isfinite()
    if not torch.equal(found.isfinite(), finite):
        return float("inf")
    difference = (found.double() - right.double())[finite].norm()
    return float(difference / right.double()[finite].norm().clamp(min=1e-30))


def run(pack: aotpack.Pack) -> list[dict[str, Any]]:
    """One row for each spec, shape and tensor."""
    rows = []
    for name, spec in pack.specs.items():
        attend = pack.attention(name)
        for shape in SHAPES:
            made = case(attend, *shape)
            mask = attend.block_mask(**made["mask"])
            ours = gradients(
                lambda q, k, v, score, a=attend, m=mask: a(q, k, v, m, return_lse=True, **score), spec, made
            )
            right = dense(spec, made)
            theirs = rival(spec, made) if attend.device.type == "cuda" else None
            for what, tensor in ours.items():
                row = {"spec": name, "shape": shape, "what": what, "to fp32": error(tensor, right[what])}
                if theirs is not None:
                    row["to compiled"] = error(tensor, theirs[what])
                    row["compiled to fp32"] = error(theirs[what], right[what])
                rows.append(row)
                print(*(f"{v:.1e}" if isinstance(v, float) else v for v in row.values()), flush=True)
    return rows


def misses(pack: aotpack.Pack, rows: list[dict[str, Any]]) -> list[str]:
    """Rows beyond their bound: its dtype's, and no worse than what torch.compile makes of it."""
    found = []
    for row in rows:
        bound = BOUNDS[pack.specs[row["spec"]].dtype]
        theirs = row.get("compiled to fp32", 0.0)
        # A wrong rule is wrong by its own size; 1.5 leaves room for the order in which atomics add.
        if not row["to fp32"] <= max(bound, 1.5 * theirs):
            found.append(f"{row['spec']} {row['shape']} {row['what']}: {row['to fp32']:.1e} > {bound:.1e}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("specs", "build", "run"))
    parser.add_argument("path", type=Path)
    parser.add_argument("target", nargs="*", default=["cuda-sm90"])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "specs":
        options.path.write_text(json.dumps({name: spec.to_dict() for name, spec in specs().items()}))
        return 0
    if options.what == "build":
        from aotpack.build import build

        build(specs(), options.target, options.path)
        return 0
    pack = aotpack.load(options.path, options.device)
    rows = run(pack)
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "rows": rows}))
    missed = misses(pack, rows)
    print("missed:", *(missed or ["nothing"]), sep="\n  ")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
