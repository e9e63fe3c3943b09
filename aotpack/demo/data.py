"""Real text to train on, and the anchors of a training step."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from aotpack.errors import HostError, InputError

__all__ = ["MASK_TOKEN", "SOURCES", "VOCAB_SIZE", "Batch", "Corpus", "sample_anchors"]

MASK_TOKEN: Final = 256
VOCAB_SIZE: Final = 257
SOURCES: Final = (
    "argparse.py",
    "ast.py",
    "collections/__init__.py",
    "dataclasses.py",
    "email/message.py",
    "inspect.py",
    "json/decoder.py",
    "json/encoder.py",
    "logging/__init__.py",
    "pathlib.py",
    "subprocess.py",
    "tarfile.py",
    "typing.py",
    "zipfile.py",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Token windows and which of their tokens are supervised.

    Attributes:
        tokens: int64 [B, S]; zero where a row is padded.
        loss_mask: bool [B, S]; False over a row's prompt and its padding.
    """

    tokens: Tensor
    loss_mask: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(tokens=self.tokens.to(device), loss_mask=self.loss_mask.to(device))


class Corpus:
    """The bytes of some files, one token a byte.

    Args:
        files: paths of the texts; each must be readable.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        if not files:
            raise InputError("a corpus needs at least one file", expected="paths of texts", found="none")
        self._texts = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in files]
        self._sizes = torch.tensor([float(text.numel()) for text in self._texts])

    @classmethod
    def of_standard_library(cls) -> Corpus:
        """The sources in ``SOURCES`` of the Python that is running.

        Raises:
            HostError: this Python has none of them as a file.
        """
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = [stdlib / name for name in SOURCES if (stdlib / name).is_file()]
        if not files:
            raise HostError(
                "the sources of the standard library are not there to train on",
                expected=f"{SOURCES[0]} and others in {stdlib}",
                found="none of them",
                remedy="use a Python installation that has its sources",
            )
        return cls(files)

    def batch(self, rows: int, length: int, generator: torch.Generator) -> Batch:
        """Random windows: each row a prompt, a supervised answer, and (all rows but the first) padding.

        Args:
            rows: B.
            length: S, in tokens.
            generator: a CPU generator; the same state gives the same batch.
        """
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        loss_mask = torch.zeros(rows, length, dtype=torch.bool)
        for row in range(rows):
            text = self._texts[int(torch.multinomial(self._sizes, 1, generator=generator))]
            filled = length if row == 0 else _between(length // 2, length, generator)
            filled = min(filled, text.numel())
            start = _between(0, text.numel() - filled, generator)
            tokens[row, :filled] = text[start : start + filled].long()
            loss_mask[row, _between(0, filled // 8, generator) : filled] = True
        return Batch(tokens=tokens, loss_mask=loss_mask)


def _between(low: int, high: int, generator: torch.Generator) -> int:
    """A random integer in [low, high]."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw each row's anchors as SpecForge does (``dflash_family_model.py``).

    An anchor may be any position whose token and next token are both supervised. A row draws
    ``num_anchors`` of them without repetition, or all it has; N is the largest number that a row
    drew, so N changes from step to step.

    Args:
        loss_mask: bool [B, S].
        num_anchors: the most anchors a row gets.
        generator: a CPU generator.

    Returns:
        anchors int64 [B, N], ascending, 0 in unused slots, and keep bool [B, N], True where a slot
        is used; both on ``loss_mask``'s device.
    """
    valid = (loss_mask[:, :-1] & loss_mask[:, 1:]).cpu()
    counts = valid.sum(dim=1)
    slots = min(num_anchors, int(counts.max()))
    if slots == 0:
        raise InputError(
            "no position of this batch can be an anchor",
            expected="two supervised tokens in a row",
            found="none in loss_mask",
            remedy="leave this batch out",
        )
    order = torch.rand(valid.shape, generator=generator).masked_fill(~valid, 2.0).argsort(dim=1)[:, :slots]
    used = torch.arange(slots) < counts[:, None]
    past_the_end = valid.shape[1]
    anchors = order.masked_fill(~used, past_the_end).sort(dim=1).values
    keep = anchors < past_the_end
    return anchors.masked_fill(~keep, 0).to(loss_mask.device), keep.to(loss_mask.device)
