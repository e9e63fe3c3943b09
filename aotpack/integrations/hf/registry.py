"""The two functions that transformers calls for an attention implementation, and where it finds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from aotpack.errors import InputError, MismatchError, UnsupportedError
from aotpack.integrations.hf.layer import Key, LayerMask, key_of, key_of_spec, score_tensors, spec_of
from aotpack.integrations.hf.structure import padded, structure_of
from aotpack.runtime.attention import Attention
from aotpack.runtime.pack import Pack
from aotpack.spec import MaskSpec

__all__ = ["Functions", "Implementation", "enter", "layer_mask"]


class Functions(Protocol):
    """What is registered under a name."""

    def mask(self, **arguments: Any) -> Any:
        """A layer type's mask for one forward pass."""

    def attention(self, module: Any, *tensors: Any, **options: Any) -> tuple[Tensor, None]:
        """One layer's attention: [B,Q,H,Dv], and no weights."""


def enter(name: str, functions: Functions) -> None:
    """Has transformers find the functions under a name; they take the place of earlier ones."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionMaskInterface.register(name, functions.mask)
    AttentionInterface.register(name, functions.attention)


def layer_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> LayerMask:
    """A layer type's mask, from what transformers passes to a mask function.

    Args:
        q_length: query rows, in tokens.
        kv_length: keys, in tokens.
        mask_function: transformers' rule.
        q_offset: position of the first query.
        kv_offset: position of the first key.
        attention_mask: bool [B,K], False where a key is padding.
        options: what other implementations need.

    Raises:
        UnsupportedError: the rule is unknown, or the queries continue a cache.
        HostError: this transformers has other mask functions.
    """
    if any(isinstance(offset, Tensor) or offset != 0 for offset in (q_offset, kv_offset)):
        raise UnsupportedError(
            "queries that continue a cache are not supported",
            expected="whole sequences, as in training",
            found=f"q_offset {q_offset}, kv_offset {kv_offset}",
            remedy='use attn_implementation="sdpa" to generate',
        )
    structure = structure_of(mask_function)
    # The same question, and on a GPU the same wait, as transformers' own implementations have.
    if attention_mask is not None and not bool(attention_mask.all()):
        structure = padded(structure, _real(attention_mask, kv_length))
    return LayerMask(structure=structure, mask=structure.mask, query_len=q_length, key_len=kv_length)


class Implementation:
    """Attention of loaded packages, one for each device."""

    def __init__(self, name: str, packs: Iterable[Pack]) -> None:
        self.name = name
        self.packs = {pack.device: pack for pack in packs}
        self._attentions: dict[tuple[torch.device, Key], Attention] = {}
        self._makers: dict[tuple[torch.device, MaskSpec], Attention] = {}
        for device, pack in self.packs.items():
            for known, spec in reversed(list(pack.specs.items())):
                self._attentions[device, key_of_spec(spec)] = pack.attention(known)
                self._makers[device, spec.mask] = pack.attention(known)

    def mask(self, **arguments: Any) -> LayerMask:
        """As ``layer_mask``, its block mask made where the package has the mask at all."""
        found = layer_mask(**arguments)
        # Here, so that layers which are compiled or repeated by checkpointing do not make it.
        maker = self._makers.get((torch.device(arguments.get("device", "cpu")), found.mask))
        if maker is not None:
            found.block_mask(maker)
        return found

    def attention(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """One layer's attention [B,Q,H,Dv]; the arguments are those of ``key_of``.

        Raises:
            UnsupportedError: the layer asks for something that no spec says.
            MismatchError: the package has not the spec that it needs.
            InputError: no package was loaded on the tensors' device.
        """
        wanted = key_of(module, query, key, value, attention_mask, s_aux=s_aux, **options)
        attend = self._attentions.get((query.device, wanted))
        if attend is None:
            raise self._missing(module, query.device, wanted, attention_mask)
        lazy = isinstance(attention_mask, LayerMask)
        mask = attention_mask.block_mask(attend) if lazy else attention_mask
        out = attend(query, key, value, mask, **score_tensors(s_aux))
        return out.transpose(1, 2).contiguous(), None

    def _missing(self, module: Any, device: torch.device, wanted: Key, mask: Any) -> Exception:
        pack = self.packs.get(device)
        if pack is None:
            return InputError(
                f"{type(module).__name__} runs on a device without a package",
                expected=" or ".join(str(known) for known in self.packs),
                found=device,
                remedy=f"register a pack for each device: aotpack.load(PACKAGE, device='{device}')",
            )
        spec = spec_of(wanted)
        source = getattr(getattr(module, "config", None), "_name_or_path", "") or "CONFIG"
        if isinstance(mask, LayerMask):
            structure = mask.structure
            source = f"--model {source}" + " --padded" * structure.padded + " --packed" * structure.packed
        target = pack.target or "cpu"
        return MismatchError(
            f"the package has not the attention that {type(module).__name__} needs",
            expected=spec.to_json(),
            found=f"{pack.path} with " + ", ".join(s.to_json() for s in pack.specs.values()),
            remedy=f"aotpack build {source} --dtype {spec.dtype} --target {target} -o NEW",
        )


def _real(attention_mask: Tensor, key_length: int) -> Tensor:
    if attention_mask.dim() != 2:
        raise UnsupportedError(
            "an attention_mask of this shape is not supported",
            expected="two axes, [batch, length]",
            found=list(attention_mask.shape),
        )
    missing = key_length - attention_mask.shape[1]
    real = torch.nn.functional.pad(attention_mask, (0, missing)) if missing > 0 else attention_mask
    return real[:, :key_length].bool()
