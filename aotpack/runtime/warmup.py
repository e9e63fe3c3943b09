"""The first call of every CUDA program, so that kernels are loaded with the package and not in a step."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from aotpack.masks import family_of
from aotpack.runtime.arguments import LENGTH_ARGUMENTS
from aotpack.runtime.attention import Attention
from aotpack.runtime.programs import CompiledPrograms, Kind
from aotpack.scores import family_of as family_of_score
from aotpack.spec.tensors import shape_of

__all__ = ["call_once", "smallest", "warm_up"]

# Packs of one library on several devices share its code.
_lock: Final = threading.Lock()


def warm_up(attend: Attention, programs: CompiledPrograms) -> None:
    """Calls each program of an attention once, with the smallest shapes it takes, every row empty.

    Waits for the device, so that a failure shows here. An exact shape takes a step's memory for the moment.
    One after the other: the driver loads kernels no faster for several threads (H200: 7 ms, and so 4).
    """
    with _lock, torch.cuda.device(attend.device), torch.no_grad():
        for kind in programs.kinds:
            call_once(attend, programs, kind)
        torch.cuda.current_stream().synchronize()


def smallest(bounds: Mapping[str, int], block_size: int) -> tuple[int, int, int]:
    """The smallest batch, query and key length that these bounds take, the query made of whole blocks."""
    divisor = bounds.get("divisor", 1)
    query = bounds.get("query", math.lcm(divisor, block_size))
    return bounds.get("batch", 1), query, bounds.get("key", query + divisor)


def call_once(attend: Attention, programs: CompiledPrograms, kind: Kind) -> None:
    """Block mask, forward and backward of one specialisation on its smallest shapes."""
    spec, family = attend.spec, family_of(attend.spec.mask)
    batch, query, key = smallest(kind.bounds, spec.mask.draft_size)
    context = key - query if family.drafts else key
    known = {
        "B": batch,
        "H": spec.heads,
        "N": query // spec.mask.draft_size,
        "T": context,
        "Q": query,
        "K": key,
    }

    def zeros(dims: tuple[str | int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape_of(dims, known, 1), dtype=dtype, device=attend.device)

    inputs = {given.name: zeros(given.dims, given.dtype) for given in family.inputs}
    read = () if spec.score is None else family_of_score(spec.score).inputs
    score = [zeros(given.dims, getattr(torch, given.dtype)) for given in read]
    asked: dict[str, int] = {LENGTH_ARGUMENTS[axis]: known[axis] for axis in family.carried}
    mask = attend.block_mask(**asked, **inputs, check=False)  # type: ignore[arg-type]
    dtype = getattr(torch, spec.dtype)
    q = torch.empty((batch, spec.heads, query, spec.head_dim), dtype=dtype, device=attend.device)
    k, v = (
        torch.empty((batch, spec.kv_heads, key, width), dtype=dtype, device=attend.device)
        for width in (spec.head_dim, spec.value_dim)
    )
    programs.warm_up(kind, q, k, v, attend.mask_tensors(mask, batch), score)
