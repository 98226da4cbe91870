"""Exchanges among ranks: sums, concatenation, and the loss of a rank."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from onbeat.engine.layers.linear import PlainLinear
from onbeat.engine.parallel.group import RankGroup, RanksUnreachable
from onbeat.engine.parallel.layers import SplitAmongRanks
from onbeat.engine.parallel.shards import Shard, vocabulary_rows
from tests.cpu.parallel.threads import run_ranks
from tests.waiting import patience


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [2, 4])
def test_sums_are_the_same_on_every_rank(size: int, dtype: torch.dtype) -> None:
    parts = [random(3, 7, seed=rank, dtype=dtype) for rank in range(size)]
    expected = torch.stack([part.double() for part in parts]).sum(0).to(dtype)
    with torch.inference_mode():
        sums = run_ranks(size, lambda group: group.sum_up(parts[group.shard.rank].clone()))
    assert all(torch.equal(total, sums[0]) for total in sums)
    torch.testing.assert_close(sums[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("size", "vocab_size"), [(2, 12), (3, 13), (4, 5)])
def test_logits_come_together_on_the_first_rank(size: int, vocab_size: int, dtype: torch.dtype) -> None:
    weight, x = random(vocab_size, 8, dtype=dtype), random(3, 8, seed=1, dtype=dtype)

    def logits(group: RankGroup) -> torch.Tensor:
        ranks = SplitAmongRanks(group, vocab_size)
        return ranks.join(PlainLinear(ranks.vocabulary_part(weight)))(x)

    first, *others = run_ranks(size, logits)
    assert first.is_contiguous()
    torch.testing.assert_close(first, x @ weight.T)
    widths = [
        len(range(vocab_size)[vocabulary_rows(vocab_size, Shard(rank, size))]) for rank in range(1, size)
    ]
    assert [part.shape[1] for part in others] == widths


def test_a_rank_that_goes_away_is_noticed_at_once() -> None:
    # A rank has its group a little before the others have theirs.
    all_connected = threading.Barrier(3, timeout=120)

    def work(group: RankGroup) -> str:
        all_connected.wait()
        if group.shard.rank == 2:
            return "gone"  # nothing holds the group any more: its connections close, as when a process ends
        with pytest.raises(RanksUnreachable, match="exchange with the other ranks failed"):
            group.sum_up(torch.zeros(4))
        return "noticed"

    with patience() as taken:
        assert run_ranks(3, work) == ["noticed", "noticed", "gone"]
    assert taken.seconds < 10


def test_a_rank_that_does_not_answer_is_given_up() -> None:
    def work(group: RankGroup) -> None:
        if group.shard.rank == 1:
            time.sleep(1.5)
            return
        with pytest.raises(RanksUnreachable):
            group.sum_up(torch.zeros(4))

    run_ranks(2, work, timeout=0.5)


def test_ranks_that_do_not_come_are_given_up(tmp_path) -> None:
    with pytest.raises(RanksUnreachable):
        RankGroup(Shard(0, 2), tmp_path / "meeting", timeout=0.3)
