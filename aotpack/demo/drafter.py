"""A DFlash drafter made of transformers' Qwen3 parts, and the target it learns from."""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from aotpack.demo.data import MASK_TOKEN, VOCAB_SIZE, Batch
from aotpack.spec import AttentionSpec

__all__ = [
    "Attend",
    "DFlashAttention",
    "Drafter",
    "Target",
    "block_loss",
    "block_positions",
    "block_tokens",
    "drafter_config",
    "drafting_loss",
    "target_layer_ids",
]


class Attend(Protocol):
    """What a drafter needs of its attention; ``pack.attention("full")`` is one."""

    @property
    def spec(self) -> AttentionSpec:
        """The attention that was compiled."""

    def block_mask(self, *, anchors: Tensor, keep: Tensor, context_len: int) -> Any:
        """The mask of one step: anchors int64 [B, N], keep bool [B, N]."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        """q [B, H, N*bs, D], k and v [B, Hk, S+N*bs, D]; returns [B, H, N*bs, D]."""


def drafter_config(spec: AttentionSpec, *, hidden_size: int, layers: int, target_layers: int) -> Qwen3Config:
    """A small drafter's config with exactly the attention of ``spec``."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        num_target_layers=target_layers,
        block_size=spec.mask.block_size,
    )


def target_layer_ids(target_layers: int, layers: int) -> list[int]:
    """The target layers a drafter of so many layers listens to: evenly spaced, second to third last."""
    if layers == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]


def block_tokens(tokens: Tensor, anchors: Tensor, keep: Tensor, block_size: int) -> Tensor:
    """What the drafter sees of its blocks: the anchor's token first, then mask tokens.

    Args:
        tokens: int64 [B, S].
        anchors: int64 [B, N].
        keep: bool [B, N].
        block_size: bs.

    Returns:
        int64 [B, N*bs].
    """
    blocks = tokens.new_full((*anchors.shape, block_size), MASK_TOKEN)
    blocks[:, :, 0] = tokens.gather(1, anchors).masked_fill(~keep, MASK_TOKEN)
    return blocks.flatten(1)


def block_positions(anchors: Tensor, context_len: int, block_size: int) -> Tensor:
    """Rotary positions along the key axis: i for context token i, a + o for offset o of anchor a.

    Returns:
        int64 [B, S + N*bs]; the last N*bs are those of the query axis.
    """
    offsets = torch.arange(block_size, device=anchors.device)
    context = torch.arange(context_len, device=anchors.device).expand(anchors.shape[0], -1)
    return torch.cat([context, (anchors[:, :, None] + offsets).flatten(1)], dim=1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, L, D] with cos and sin [B, L, D]."""
    turned: Tensor = rotate_half(x)
    return x * cos[:, None] + turned * sin[:, None]


class DFlashAttention(nn.Module):
    """Queries from the draft blocks; keys and values from the target's context, then the blocks.

    Args:
        config: heads, head_dim and hidden size.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, int(config.head_dim)
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * head_dim, hidden, bias=False)
        self.q_norm = Qwen3RMSNorm(head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(head_dim, eps=config.rms_norm_eps)

    def forward(
        self, blocks: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, mask: Any
    ) -> Tensor:
        """Attend from the blocks.

        Args:
            blocks: [B, N*bs, hidden].
            context: [B, S, hidden].
            rotary: cos and sin, [B, S+N*bs, head_dim] each.
            attend: the attention, called in its spec's dtype whatever the weights have.
            mask: what ``attend.block_mask`` gave for this step.

        Returns:
            [B, N*bs, hidden].
        """
        cos, sin = rotary
        rows = blocks.shape[1]
        both = torch.cat([context, blocks], dim=1)
        q = _rotate(self.q_norm(self._heads(self.q_proj(blocks))), cos[:, -rows:], sin[:, -rows:])
        k = _rotate(self.k_norm(self._heads(self.k_proj(both))), cos, sin)
        v = self._heads(self.v_proj(both))
        dtype: torch.dtype = getattr(torch, attend.spec.dtype)
        out = attend(q.to(dtype), k.to(dtype), v.to(dtype), mask)
        return cast(Tensor, self.o_proj(out.to(blocks.dtype).transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, L, heads*D] to [B, heads, L, D]."""
        return x.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2)


class DFlashLayer(nn.Module):
    """A Qwen3 decoder layer with ``DFlashAttention`` in it."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, blocks: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend, mask: Any
    ) -> Tensor:
        """Shapes as in ``DFlashAttention.forward``."""
        blocks = blocks + self.self_attn(self.input_layernorm(blocks), context, rotary, attend, mask)
        return blocks + cast(Tensor, self.mlp(self.post_attention_layernorm(blocks)))


class Drafter(nn.Module):
    """A DFlash drafter: it shares its target's embedding and predicts whole blocks at once.

    Args:
        config: made by ``drafter_config``.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        layers = config.num_hidden_layers
        self.fc = nn.Linear(layers * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def forward(
        self, blocks: Tensor, target_hidden: Tensor, positions: Tensor, attend: Attend, mask: Any
    ) -> Tensor:
        """Hidden states of the drafted tokens.

        Args:
            blocks: embeddings of ``block_tokens``, [B, N*bs, hidden].
            target_hidden: the target's hidden states, [B, S, layers*hidden].
            positions: ``block_positions``, int64 [B, S+N*bs].
            attend: the attention.
            mask: this step's mask, shared by all layers.

        Returns:
            [B, N*bs, hidden].
        """
        context = self.hidden_norm(self.fc(target_hidden))
        rotary = self.rotary_emb(blocks, positions)
        for layer in self.layers:
            blocks = layer(blocks, context, rotary, attend, mask)
        return cast(Tensor, self.norm(blocks))


class Target(nn.Module):
    """A frozen Qwen3 model with random weights over bytes.

    Args:
        hidden_size: of the target, and so of its drafter.
        layers: decoder layers.
        layer_ids: which layers' outputs the drafter gets.
    """

    def __init__(self, *, hidden_size: int, layers: int, layer_ids: list[int]) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=hidden_size // 4,
            initializer_range=hidden_size**-0.5,
            attn_implementation="sdpa",
        )
        self.layer_ids = layer_ids
        self.model = Qwen3Model(config).eval().requires_grad_(False)

    @property
    def embedding(self) -> nn.Embedding:
        """Token embedding, also the output head: [VOCAB_SIZE, hidden]."""
        return cast(nn.Embedding, self.model.embed_tokens)

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        """Hidden states of the layers in ``layer_ids`` side by side: [B, S] to [B, S, len*hidden]."""
        states = self.model(input_ids=tokens, output_hidden_states=True, use_cache=False).hidden_states
        return torch.cat([states[i + 1] for i in self.layer_ids], dim=-1)


def drafting_loss(
    drafter: Drafter, target: Target, attend: Attend, batch: Batch, anchors: Tensor, keep: Tensor
) -> Tensor:
    """One thread's forward: block mask, drafter, loss.

    Args:
        drafter: in training.
        target: frozen.
        attend: the attention, ``pack.attention("full")`` or anything called the same way.
        batch: B rows of S tokens.
        anchors: int64 [B, N].
        keep: bool [B, N].

    Returns:
        A scalar that requires gradients.
    """
    size, length = cast(int, attend.spec.mask.block_size), batch.tokens.shape[1]
    mask = attend.block_mask(anchors=anchors, keep=keep, context_len=length)
    blocks = target.embedding(block_tokens(batch.tokens, anchors, keep, size))
    positions = block_positions(anchors, length, size)
    hidden = drafter(blocks, target(batch.tokens), positions, attend, mask)
    return block_loss(hidden, target.embedding, batch, anchors, keep)


def block_loss(
    hidden: Tensor, embedding: nn.Embedding, batch: Batch, anchors: Tensor, keep: Tensor
) -> Tensor:
    """Mean cross-entropy of the tokens after each anchor: offset o of anchor a predicts token a + o.

    Not counted are o = 0, anchors that are not kept, positions past the end and those outside
    ``batch.loss_mask``.

    Args:
        hidden: the drafter's, [B, N*bs, hidden].
        embedding: the target's, which is also the output head.
        batch: tokens [B, S].
        anchors: int64 [B, N].
        keep: bool [B, N].
    """
    length = batch.tokens.shape[1]
    size = hidden.shape[1] // anchors.shape[1]
    labels = anchors[:, :, None] + torch.arange(size, device=anchors.device)
    inside = labels.clamp(max=length - 1).flatten(1)
    counted = keep[:, :, None] & (labels < length)
    counted[:, :, 0] = False
    counted = counted.flatten(1) & batch.loss_mask.gather(1, inside)
    logits = functional.linear(hidden[counted], embedding.weight)
    return functional.cross_entropy(logits, batch.tokens.gather(1, inside)[counted])
