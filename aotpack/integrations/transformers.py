"""``attn_implementation="aotpack"``: attention of a package in models of transformers.

    from aotpack.integrations import transformers as hf

    hf.register("qwen3.aotpack", device="cuda")
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="aotpack")

Works in training, for models that transformers runs with flex_attention: full, sliding and chunked layers,
right or left padding, packed position ids, soft-capped scores, attention sinks. A trainer that makes its
masks itself passes what ``block_mask`` returned as the attention_mask. What a package does not have is
refused by name when a layer asks for it.
"""

from __future__ import annotations

from typing import Any

import torch

import aotpack.runtime
from aotpack.errors import InputError
from aotpack.integrations.hf.needed import needed
from aotpack.integrations.hf.registry import Implementation, enter
from aotpack.integrations.hf.structure import check
from aotpack.runtime.pack import Pack
from aotpack.spec import AttentionSpec
from aotpack.store import Places

__all__ = ["register", "specs"]


def register(
    *packages: Pack | Places,
    model: Any = None,
    padded: bool = False,
    packed: bool = False,
    device: str | torch.device = "cpu",
    name: str = "aotpack",
    **options: Any,
) -> tuple[Pack, ...]:
    """Registers attention and mask functions with transformers; models find them by the name.

    The registration is the process's and serves all its threads. Another one under the same name takes its
    place, also in models that exist already.

    Args:
        packages: packs, one for each device that models run on, or what ``aotpack.load`` takes.
        model: a model, its config or a folder with one, whose specs the packages must have (see ``specs``).
        padded: whether they must have those of padded batches too.
        packed: whether they must have those of packed batches too.
        device: where packages that are no packs yet are loaded.
        name: for ``attn_implementation``.
        options: of ``aotpack.load``.

    Returns:
        The packs, to be asked for their stats.

    Raises:
        MismatchError: a spec that the model needs is not in a package.
        InputError: no package, or two for one device.
        HostError: this transformers has other mask functions than those that are known.
        AotpackError: as ``aotpack.load``.
    """
    check()
    packs = tuple(p if isinstance(p, Pack) else aotpack.runtime.load(p, device, **options) for p in packages)
    if not packs or len({pack.device for pack in packs}) < len(packs):
        raise InputError(
            "one package a device is needed",
            expected="a package, or packs on different devices",
            found=", ".join(f"{pack.path} on {pack.device}" for pack in packs) or "none",
        )
    if model is not None:
        wanted = list(specs(model, padded=padded, packed=packed).values())
        for pack in packs:
            pack.require(wanted)
    enter(name, Implementation(name, packs))
    return packs


def specs(
    model: Any, *, padded: bool = False, packed: bool = False, dtype: str | None = None
) -> dict[str, AttentionSpec]:
    """The specs of a model's attention, by name, as ``aotpack.build.build`` takes them.

    They come from one forward pass on the meta device, without weights, through the same functions that
    training calls. ``aotpack.capture`` would not do: transformers computes sinks outside of flex_attention
    and refuses them on the CPU, and its masks would be recorded rules, not families.

    Args:
        model: a model, a config, or the path of one or of its folder; of a multimodal config its text model.
        padded: add the specs of batches with padding.
        packed: add those of packed batches, whose position_ids begin anew with each document.
        dtype: that attention runs in, where it is not the model's own: under autocast, autocast's.

    Raises:
        SpecError: the model has no attention, or cannot be run without values.
        UnsupportedError: it asks for something that no spec says.
        InputError: this is no model.
    """
    return needed(model, padded, packed, dtype)
