"""``aotpack demo``: build a drafter's attention, load it, check it, and train with it from threads."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

import aotpack
from aotpack.build import BuildReport, Stage, build
from aotpack.demo.train import STEPS, TrainResult, train
from aotpack.dense import dense_attention
from aotpack.drafter import specs_from_config
from aotpack.masks import Lengths, dense
from aotpack.spec import AttentionSpec

__all__ = ["CONFIG", "SCHEMA", "max_rel_error", "run_demo"]

SCHEMA: Final = "aotpack.demo/1"
CONFIG: Final = Path(__file__).with_name("config.json")

_Function = Callable[[Tensor, Tensor, Tensor], Tensor]

# Batch, context and anchors of the steps that are compared with dense math.
_CASES: Final = ((1, 64, 1), (2, 129, 7), (1, 777, 13))


def run_demo(
    output: Path | None = None,
    *,
    threads: int = 3,
    steps: int = STEPS,
    progress: Callable[[Stage], None] | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Build for this CPU, load, compare with fp64 math, train.

    Args:
        output: the package file to write; without it the package is in a temporary folder that is
            removed at the end.
        threads: drafter threads.
        steps: optimizer steps.
        progress: called as the build's stages begin and end.
        on_step: called with each step's number and loss.

    Returns:
        The object that ``aotpack demo --json`` prints. Errors are ||x - exact|| / ||exact||, the largest
        of a few steps of different lengths; ``traces`` is counted over the whole process.

    Raises:
        TracingError: a thread of this process traced or compiled something.
    """
    with aotpack.no_tracing() as watch, _destination(output) as path:
        report = build(specs_from_config(CONFIG), ["cpu"], path, progress=progress)
        start = time.perf_counter()
        attend = aotpack.load(path).attention("full")
        load_ms = 1e3 * (time.perf_counter() - start)
        errors = max_rel_error(attend)
        result = train(path, threads, steps, on_step=on_step)
        return _object(report, load_ms, errors, result, watch.count)


def _object(
    report: BuildReport, load_ms: float, errors: dict[str, float], result: TrainResult, traces: int
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "package_bytes": report.size,
        "targets": list(dict.fromkeys(stage.target for stage in report.stages)),
        "build_s": round(report.seconds, 2),
        "load_ms": round(load_ms, 2),
        "first_step_ms": round(result.first_step_ms, 1),
        "threads": result.threads,
        "traces": traces,
        "max_rel_error": errors,
        "loss": {"first": round(result.first_loss, 4), "last": round(result.last_loss, 4)},
    }


@contextlib.contextmanager
def _destination(output: Path | None) -> Iterator[Path]:
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="aotpack-demo-") as folder:
        yield Path(folder) / "demo.aotpack"


def max_rel_error(attend: aotpack.Attention) -> dict[str, float]:
    """Largest ||x - exact|| / ||exact|| of out, dq, dk and dv over steps of different lengths.

    "exact" is dense fp64 math on the same inputs. Steps of several blocks have some that are not kept.
    """
    worst = dict.fromkeys(("out", "dq", "dk", "dv"), 0.0)
    dtype: torch.dtype = getattr(torch, attend.spec.dtype)
    for seed, lengths in enumerate(_CASES):
        step = _Step.random(attend.spec, *lengths, seed=seed)
        found, exact = step.run(_compiled(attend, step), dtype), step.run(_exact(attend, step), torch.float64)
        for name in worst:
            error = (found[name].double() - exact[name]).norm() / exact[name].norm()
            worst[name] = max(worst[name], float(error))
    return worst


def _compiled(attend: aotpack.Attention, step: _Step) -> _Function:
    mask = attend.block_mask(anchors=step.anchors, keep=step.keep, context_len=step.context)
    return lambda q, k, v: attend(q, k, v, mask)


def _exact(attend: aotpack.Attention, step: _Step) -> _Function:
    lengths = Lengths(batch=step.q.shape[0], query=step.q.shape[2], key=step.k.shape[2])
    visible = dense(attend.spec.mask, {"anchors": step.anchors, "keep": step.keep}, lengths)
    return lambda q, k, v: dense_attention(q, k, v, visible, attend.spec.scale)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """Random q [B,H,N*bs,D], k and v [B,Hk,S+N*bs,D], gradient of out, anchors and keep [B,N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    anchors: Tensor
    keep: Tensor
    context: int

    @classmethod
    def random(cls, spec: AttentionSpec, batch: int, context: int, anchors: int, *, seed: int) -> _Step:
        """Values that are exact in the spec's dtype."""
        generator = torch.Generator().manual_seed(seed)
        query = anchors * (spec.mask.block_size or 1)
        keep = torch.ones(batch, anchors, dtype=torch.bool)
        keep[:, 1 : anchors // 2 + 1 : 3] = False

        def draw(heads: int, length: int, size: int) -> Tensor:
            values = torch.randn(batch, heads, length, size, generator=generator)
            return values.to(getattr(torch, spec.dtype))

        return cls(
            q=draw(spec.heads, query, spec.head_dim),
            k=draw(spec.kv_heads, context + query, spec.head_dim),
            v=draw(spec.kv_heads, context + query, spec.value_dim),
            grad_out=draw(spec.heads, query, spec.value_dim),
            anchors=torch.randint(context, (batch, anchors), generator=generator).sort(dim=1).values,
            keep=keep,
            context=context,
        )

    def run(self, attention: _Function, dtype: torch.dtype) -> dict[str, Tensor]:
        """out, dq, dk and dv of an attention that works in ``dtype``."""
        q, k, v = (x.to(dtype).requires_grad_() for x in (self.q, self.k, self.v))
        out = attention(q, k, v)
        grads = torch.autograd.grad(out, (q, k, v), self.grad_out.to(dtype))
        return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))
