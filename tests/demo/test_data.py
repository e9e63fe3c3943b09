from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest
import torch

from aotpack.demo.data import Corpus, sample_anchors
from aotpack.errors import HostError, InputError


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_loss_mask(rows: int, length: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, length, generator=seeded(seed)) < 0.6


def test_windows_are_text_of_the_standard_library():
    batch = Corpus.of_standard_library().batch(3, 200, seeded())
    first = bytes(batch.tokens[0].tolist())
    stdlib = Path(sysconfig.get_path("stdlib"))
    assert any(first in path.read_bytes() for path in stdlib.rglob("*.py"))


def test_padding_and_prompts_are_not_supervised():
    batch = Corpus.of_standard_library().batch(16, 200, seeded())
    assert batch.tokens.shape == batch.loss_mask.shape == (16, 200)
    supervised = batch.loss_mask.sum(dim=1)
    assert supervised.min() >= 50
    assert supervised.unique().numel() > 4
    assert batch.loss_mask[0, -1]
    assert not batch.loss_mask[1:, -1].all()
    assert (batch.tokens[~batch.loss_mask & (torch.arange(200) > 100)] == 0).all()


def test_the_same_generator_state_gives_the_same_batch():
    corpus = Corpus.of_standard_library()
    one, other = corpus.batch(2, 64, seeded(3)), corpus.batch(2, 64, seeded(3))
    assert torch.equal(one.tokens, other.tokens)
    assert torch.equal(one.loss_mask, other.loss_mask)
    assert not torch.equal(one.tokens, corpus.batch(2, 64, seeded(4)).tokens)


def test_a_text_shorter_than_the_window_is_padded(tmp_path):
    short = tmp_path / "short.txt"
    short.write_bytes(b"x" * 40)
    batch = Corpus([short]).batch(2, 64, seeded())
    assert (batch.tokens[0, :40] == ord("x")).all()
    assert not batch.loss_mask[:, 40:].any()


def test_a_python_without_sources_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(HostError, match="sources of the standard library") as caught:
        Corpus.of_standard_library()
    assert caught.value.expected == f"argparse.py and others in {tmp_path}"


@pytest.mark.parametrize("num_anchors", [1, 5, 400])
@pytest.mark.parametrize("seed", [0, 1])
def test_anchors_are_supervised_positions_whose_next_one_is_too(num_anchors, seed):
    loss_mask = random_loss_mask(3, 50, seed)
    anchors, keep = sample_anchors(loss_mask, num_anchors, seeded(seed))
    for row in range(3):
        chosen = anchors[row, keep[row]].tolist()
        allowed = [i for i in range(49) if loss_mask[row, i] and loss_mask[row, i + 1]]
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= set(allowed)
        assert len(chosen) == min(num_anchors, len(allowed))


def test_unused_slots_come_last_and_hold_zero():
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[0, 3:19] = True
    loss_mask[1, 10:13] = True
    anchors, keep = sample_anchors(loss_mask, 8, seeded())
    assert keep.tolist() == [[True] * 8, [True] * 2 + [False] * 6]
    assert anchors[1].tolist() == [10, 11, 0, 0, 0, 0, 0, 0]
    assert anchors.dtype == torch.int64


def test_the_number_of_slots_follows_the_batch():
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[0, 3:9] = True
    anchors, keep = sample_anchors(loss_mask, 8, seeded())
    assert anchors.shape == keep.shape == (2, 5)
    assert not keep[1].any()


def test_every_allowed_position_is_drawn_equally_often():
    loss_mask = torch.ones(1, 11, dtype=torch.bool)
    generator = seeded()
    drawn = torch.cat([sample_anchors(loss_mask, 2, generator)[0].flatten() for _ in range(2000)])
    share = torch.bincount(drawn, minlength=11)[:10] / drawn.numel()
    assert share.min() > 0.08
    assert share.max() < 0.12


def test_a_batch_without_a_possible_anchor_is_refused():
    loss_mask = torch.tensor([[True, False, True, False]])
    with pytest.raises(InputError, match="no position of this batch can be an anchor"):
        sample_anchors(loss_mask, 4, seeded())
