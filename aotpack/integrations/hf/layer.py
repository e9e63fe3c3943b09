"""One layer's call of attention by transformers: which spec it is, and what no spec says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from aotpack.errors import UnsupportedError
from aotpack.integrations.hf.structure import Structure
from aotpack.runtime.attention import Attention
from aotpack.runtime.mask import BlockMask
from aotpack.spec import AttentionSpec, MaskSpec, ScoreSpec

__all__ = ["Key", "LayerMask", "key_of", "key_of_spec", "score_tensors", "spec_of"]

# heads, kv_heads, head_dim, value_dim, dtype, scale, mask, score.
Key = tuple[int, int, int, int, str, float, MaskSpec, ScoreSpec | None]
# Models that transformers runs with flex_attention, and why they are refused, by the start of their type.
_REFUSED: Final[Mapping[str, str]] = {
    "gemma4": "layers that share keys and slice their masks",
}
_SINKS: Final = ScoreSpec(family="sinks")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerMask:
    """The mask of one forward pass for all layers of one type; what a model takes for its attention_mask.

    Attributes:
        structure: what it is made of, and its tensors.
        mask: the mask family.
        query_len: in tokens.
        key_len: in tokens.
    """

    structure: Structure
    mask: MaskSpec
    query_len: int
    key_len: int
    _blocks: dict[torch.device, BlockMask] = field(default_factory=dict)

    def block_mask(self, attend: Attention) -> BlockMask:
        """Made when a device's is first asked for, then shared by all layers."""
        found = self._blocks.get(attend.device)
        if found is None:
            tensors: dict[str, Any] = {n: t.to(attend.device) for n, t in self.structure.tensors.items()}
            found = attend.block_mask(query_len=self.query_len, context_len=self.key_len, **tensors)
            self._blocks[attend.device] = found
        return found


def key_of(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> Key:
    """What a layer's attention is.

    Args:
        module: the layer.
        query: [B,H,Q,D].
        key: [B,Hk,K,D].
        value: [B,Hk,K,Dv].
        attention_mask: what the registered mask function returned, or ``Attention.block_mask``.
        scaling: factor of the scores.
        dropout: of the weights.
        softcap: bound of the scores.
        s_aux: attention sinks [H].
        position_bias: added to the scores.
        options: whatever else the model passes.

    Raises:
        UnsupportedError: the layer asks for something that no spec says.
    """
    kind = str(getattr(getattr(module, "config", None), "model_type", ""))
    for start, why in _REFUSED.items():
        if kind.startswith(start):
            _refuse(module, f"models of the type {start} are not supported", "another model", why)
    if dropout > 0:
        _refuse(module, "attention dropout is not supported", "attention_dropout = 0 in the config", dropout)
    if position_bias is not None:
        _refuse(module, "a position bias is not supported", "no position_bias", "a tensor of biases")
    if options.get("output_attentions"):
        _refuse(module, "attention weights are never computed", "output_attentions=False", True)
    mask = _mask_of(attention_mask)
    if mask is None:
        _refuse_mask(module, attention_mask, options.get("is_causal"))
    size = query.shape[3]
    scale = size**-0.5 if scaling is None else float(scaling)
    score = _score(softcap, s_aux is not None)
    heads = (query.shape[1], key.shape[1], size, value.shape[3])
    return (*heads, _dtype(query), scale, mask, score)


def key_of_spec(spec: AttentionSpec) -> Key:
    """The same of a spec; precision and determinism are the builder's choice."""
    sizes = (spec.heads, spec.kv_heads, spec.head_dim, spec.value_dim)
    return (*sizes, spec.dtype, spec.scale, spec.mask, spec.score)


def spec_of(key: Key) -> AttentionSpec:
    """The spec to build for it."""
    names = ("heads", "kv_heads", "head_dim", "value_dim", "dtype", "scale", "mask", "score")
    values: dict[str, Any] = dict(zip(names, key, strict=True))
    return AttentionSpec(**values)


def score_tensors(s_aux: Tensor | None) -> dict[str, Any]:
    """The tensors of the score, in float32, as attention takes them."""
    return {} if s_aux is None else {"sinks": s_aux.float()}


def _score(softcap: float | None, sinks: bool) -> ScoreSpec | None:
    parts = [] if softcap is None else [ScoreSpec(family="softcap", cap=softcap)]
    parts += [_SINKS] * sinks
    if len(parts) > 1:
        return ScoreSpec(family="chain", parts=tuple(parts))
    return parts[0] if parts else None


def _mask_of(attention_mask: Any) -> MaskSpec | None:
    if isinstance(attention_mask, LayerMask):
        return attention_mask.mask
    return attention_mask.spec if isinstance(attention_mask, BlockMask) else None


def _dtype(query: Tensor) -> str:
    kind = query.device.type
    cast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return str(torch.get_autocast_dtype(kind) if cast else query.dtype).removeprefix("torch.")


def _refuse_mask(module: Any, found: Any, causal: bool | None) -> NoReturn:
    if found is not None:
        shape = f" of shape {list(found.shape)}" if hasattr(found, "shape") else ""
        _refuse(
            module,
            "a mask that was made elsewhere is not supported",
            "an attention_mask of two axes [batch, length], or packed position_ids",
            f"{type(found).__name__}{shape}",
        )
    if causal if causal is not None else getattr(module, "is_causal", True):
        _refuse(
            module,
            "a causal layer came without a mask",
            "the mask that aotpack's mask function makes",
            "attention_mask=None, which transformers passes where no mask function is registered under this"
            " name, and for paged caches",
            "call aotpack.integrations.transformers.register, which registers both functions",
        )
    _refuse(
        module,
        "a layer that is not causal came without a mask",
        "layers of a language model",
        "attention_mask=None, as a vision or audio tower has it",
        'give it another attention: attn_implementation={"text_config": "aotpack", "vision_config": "sdpa"}',
    )


def _refuse(module: Any, problem: str, expected: str, found: object, remedy: str | None = None) -> NoReturn:
    raise UnsupportedError(
        f"{type(module).__name__}: {problem}",
        expected=expected,
        found=found,
        remedy=remedy or 'change it, or use attn_implementation="sdpa" for this model',
    )
