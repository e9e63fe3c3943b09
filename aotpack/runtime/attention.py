"""One attention on one device: its block mask and its differentiable, thread-safe call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, Self, overload

import torch
from torch import Tensor

from aotpack.dense import dense_attention
from aotpack.errors import HostError, UnsupportedError
from aotpack.masks import Lengths, dense, family_of
from aotpack.runtime import direct
from aotpack.runtime.arguments import check_positions, read_arguments, read_score
from aotpack.runtime.checks import QkvCheck, check_mask
from aotpack.runtime.mask import BlockMask
from aotpack.runtime.operator import attention, enroll
from aotpack.runtime.origin import reload_attention
from aotpack.runtime.programs import CompiledPrograms
from aotpack.runtime.reblock import dense_cells
from aotpack.runtime.scored_operator import enroll_scored, scored_attention
from aotpack.runtime.stats import AttentionStats, Tally
from aotpack.runtime.torch_mask import adopt, is_torch_block_mask
from aotpack.scores import family_of as family_of_score
from aotpack.spec import AttentionSpec

if TYPE_CHECKING:
    from aotpack.runtime.origin import Origin

__all__ = ["Attention"]

_DTYPES: Final = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}


class Attention:
    """The attention of one spec on one device; ``Pack.attention`` makes it.

    Thread-safe, and one for all layers and threads of a device. A module that holds one may be copied, and
    shares it with the copy. A pickle of it names the package by its digest: to read it is to load that
    package again, from where it was or from the store, on the device of that name.

    Attributes:
        name: of the spec in its package.
        spec: what was compiled.
        device: where its tensors must be.
        compiled: False for the eager fallback, which is dense math.
    """

    def __init__(
        self,
        name: str,
        spec: AttentionSpec,
        device: torch.device,
        programs: CompiledPrograms | None,
        origin: Origin | None = None,
    ) -> None:
        self.name = name
        self.spec = spec
        self.device = device
        self.compiled = programs is not None
        self._family = family_of(spec.mask)
        self._dtype, self._type = _DTYPES[spec.dtype], device.type
        self._check = QkvCheck(spec, self._dtype, device)
        self._programs = programs
        self._score = None if spec.score is None else family_of_score(spec.score)
        self._key = self._enrolled()
        self._origin = origin
        self._masks, self._eagers = Tally(), Tally()

    def __repr__(self) -> str:
        how = "compiled" if self.compiled else "eager"
        return f"<aotpack attention {self.name!r} on {self.device}, {how}: {self.spec.to_json()}>"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Attention], tuple[Any, ...]]:
        if self._origin is None:
            raise UnsupportedError(
                "this attention cannot be pickled",
                expected="one of a pack that aotpack.load returned",
                found="one that was made in another way",
            )
        return reload_attention, (self._origin.state(), self.name, self.spec.to_dict())

    def stats(self) -> AttentionStats:
        """Its calls up to now; ``Pack.stats`` has those of all attentions."""
        programs = self._programs
        if programs is None:
            return AttentionStats(
                spec=self.spec.digest,
                folder=None,
                block_masks=self._masks.value,
                forward={"eager": self._eagers.value},
            )
        return AttentionStats(
            spec=self.spec.digest,
            folder=str(programs.folder),
            block_masks=programs.block_masks.value,
            forward={kind.name: kind.forwards.value for kind in programs.kinds},
            backward={kind.name: kind.backwards.value for kind in programs.kinds},
        )

    def block_mask(
        self,
        *,
        query_len: int | None = None,
        context_len: int | None = None,
        check: bool | None = None,
        **tensors: Tensor | None,
    ) -> BlockMask:
        """The mask of one step, for all layers that share it.

        Which arguments a mask family takes (B batch, N anchors, T and S packed lengths, Q query length):

        - ``dflash``: anchors int64 [B,N], position of each block's anchor in the context; keep bool [B,N],
          False empties a block's rows; context_len. The query length is N * block_size, the key length
          context_len + N * block_size.
        - ``dflash-speculators``: document_ids int64 [T], -1 is padding; anchors int64 [N]; context_len (T).
        - ``eagle3``: lengths int64 [B], real tokens of each entry; query_len Q; context_len, the key length
          (k + 1) * Q of step k.
        - ``eagle3-speculators``: document_ids int64 [Q]; context_len, the key length.
        - ``peagle``: anchor_pos and depth, int64 [Q]; document_ids int64 [S].
        - ``document``: document_ids int64 [B,Q], or [Q] for all entries.
        - ``chunked``: start int64 [B], query_len and context_len, the key length.
        - ``padding``: real bool [B,K], query_len.
        - ``prefix``: prefix int64 [B], query_len and context_len, the key length.
        - ``causal``, ``sliding``, ``full``: query_len and context_len, the key length.
        - ``and``, ``or``: what the parts take.
        - a rule of your own: the tensors it declares; query_len and context_len unless an axis "Q" or "K" of
          a tensor says them, or context_len where it drafts.

        Args:
            query_len: query rows, in tokens; may be left out where the tensors say it.
            context_len: context, in tokens; likewise.
            check: whether positions are checked to be inside the context, which reads their values; by
                default on the CPU only, because on a GPU it would wait for the device.
            tensors: what the family takes, by name.

        Raises:
            InputError: arguments that do not fit the mask family or each other.
        """
        given = {"query_len": query_len, "context_len": context_len}
        read, lengths = read_arguments(self._family, self.spec.mask, self.device, tensors, given)
        if check if check is not None else self.device.type == "cpu":
            check_positions(self._family, read, lengths)
        if self._programs is None:
            self._masks.add()
            visible = dense(self.spec.mask, read, lengths)
            return BlockMask(spec=self.spec.mask, lengths=lengths, tensors=(), dense=visible.to(self.device))
        found = self._programs.block_mask([*read.values(), *self._carriers(lengths)], lengths)
        return BlockMask(spec=self.spec.mask, lengths=lengths, tensors=tuple(found))

    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, return_lse: Literal[False] = ..., **tensors: Tensor
    ) -> Tensor: ...
    @overload
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, return_lse: Literal[True], **tensors: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any, return_lse: bool = False, **tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention over the mask's visible cells; differentiable in q, k, v and a score's trained tensors.

        Args:
            q: [B,heads,Q,head_dim], of the spec's dtype; under autocast to that dtype, of any.
            k: [B,kv_heads,KV,head_dim].
            v: [B,kv_heads,KV,value_dim].
            mask: from ``block_mask``, or on the CPU a torch ``BlockMask`` of any block size.
            return_lse: also return the natural log-sum-exp of the scaled and modified scores, sinks included.
            tensors: what the spec's score reads, by name, in its own dtype: ``table`` float32
                [heads,2R+1] (``relative-bias``), ``bias`` float32 [heads,Q,KV] (``bias``), ``sinks`` float32
                [heads] (``sinks``), or what a rule of your own declares.

        Returns:
            out [B,heads,Q,value_dim] in the spec's dtype and, if asked, lse [B,heads,Q] float32. An empty
            row has out 0, lse -inf and gradients 0.

        Raises:
            InputError: tensors that do not fit the spec or the mask.
            UnsupportedError: a second derivative.
        """
        if torch.is_autocast_enabled(self._type) and torch.get_autocast_dtype(self._type) == self._dtype:
            q, k, v = q.to(self._dtype), k.to(self._dtype), v.to(self._dtype)
        plain = direct.is_plain(q, k, v, tensors.values())
        self._check(q, k, v, plain=plain)
        block_mask = adopt(mask, q, k) if is_torch_block_mask(mask) else mask
        check_mask(self.spec, self.device, q, k, block_mask)
        if self._score is not None or tensors:
            out, lse = self._scored(q, k, v, block_mask, tensors, plain)
        elif self._programs is None:
            out, lse = self._eager(q, k, v, block_mask)
        else:
            of_mask = self.mask_tensors(block_mask, q.shape[0])
            if plain:
                out, lse = direct.attend(self._key, self._programs, q, k, v, of_mask)
            else:
                out, lse = attention(self._key, q, k, v, of_mask)
        return (out, lse) if return_lse else out

    def mask_tensors(self, mask: BlockMask, batch: int) -> list[Tensor]:
        """What the programs take of a mask, for that many batch entries."""
        # CUDA kernels index a batched family's mask by the batch entry; the CPU's may share one.
        if self.device.type == "cpu" or not self._family.batched or mask.lengths.batch == batch:
            return list(mask.tensors)
        return [tensor.expand(batch, *tensor.shape[1:]).contiguous() for tensor in mask.tensors]

    def _enrolled(self) -> int:
        if self._programs is None:
            return 0
        if self._score is None:
            return enroll(self._programs)
        names, trained = tuple(g.name for g in self._score.inputs), len(self._score.trained)
        if (self._programs.score, self._programs.trained) != (names, trained):
            raise HostError(
                "the programs of this package take other tensors than the spec's score",
                expected=f"{', '.join(names)}; {trained} of them with a gradient",
                found=f"{', '.join(self._programs.score)}; {self._programs.trained} of them with a gradient",
                remedy="build the package again with this release of aotpack",
            )
        return enroll_scored(self._programs)

    def _scored(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, tensors: Mapping[str, Tensor], plain: bool
    ) -> tuple[Tensor, Tensor]:
        lengths = Lengths(batch=q.shape[0], query=q.shape[2], key=k.shape[2])
        score = read_score(self._score, self.spec, self.device, tensors, lengths, self._family.drafts)
        assert self._score is not None
        trained = len(self._score.trained)
        if self._programs is not None:
            of_mask = self.mask_tensors(mask, q.shape[0])
            if plain:
                return direct.attend(self._key, self._programs, q, k, v, of_mask, score, trained)
            return scored_attention(self._key, q, k, v, of_mask, score[:trained], score[trained:])
        named = {given.name: tensor for given, tensor in zip(self._score.inputs, score, strict=True)}
        fixed = {given.name: named[given.name].detach() for given in self._score.inputs[trained:]}
        return self._eager(
            q, k, v, mask, **self._score.for_dense({**named, **fixed}, lengths.query, lengths.key)
        )

    def _eager(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, **score: Any) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():
            self._eagers.add()
        visible = dense_cells(mask.tensors, mask.lengths) if mask.dense is None else mask.dense
        out, lse = dense_attention(q.float(), k.float(), v.float(), visible, self.spec.scale, **score)
        return out.to(self._dtype), lse

    def _carriers(self, lengths: Lengths) -> list[Tensor]:
        """Tensors whose sizes tell a program the lengths; they share one byte of storage."""
        if not self._family.carried:
            return []
        byte = torch.empty(1, dtype=torch.int8, device=self.device)
        sizes = {"T": lengths.key - lengths.query, "Q": lengths.query, "K": lengths.key}
        return [byte.expand(sizes[axis]) for axis in self._family.carried]
