"""The token budget: a multiple of the tile, the largest that keeps the objective."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.token_budget import (
    DEFAULT_TILE,
    LARGEST_BUDGET,
    choose_token_budget,
    full_step,
    mean_decode_context,
)
from tests.examples import examples


class TiledProfile(StepTimeModel):
    """A step-time model like a device: fixed cost, whole tiles of tokens, and context to read."""

    def __init__(self, *, fixed: float, per_tile: float, per_context: float, tile: int = 128) -> None:
        self.fixed, self.per_tile, self.per_context, self.tile = fixed, per_tile, per_context, tile

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        tiles = -(-shape.num_new_tokens // self.tile)
        context = shape.decode_context_tokens + shape.chunk_cached_tokens
        mean = self.fixed + tiles * self.per_tile + context * self.per_context
        return mean if q is None else mean * (1 + q)

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        raise NotImplementedError

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


PROFILES = st.builds(
    TiledProfile,
    fixed=st.floats(1e-4, 0.02),
    per_tile=st.floats(1e-3, 0.02),
    per_context=st.floats(0, 1e-7),
    tile=st.sampled_from([64, 128, 256]),
)


@examples(100)
@given(
    profile=PROFILES,
    tbt=st.floats(0.02, 0.5),
    max_num_seqs=st.integers(1, 300),
    context_tokens=st.integers(1, 8000),
)
def test_is_the_largest_multiple_of_the_tile_that_keeps_the_objective(
    profile: TiledProfile, tbt: float, max_num_seqs: int, context_tokens: int
) -> None:
    def seconds(budget: int) -> float:
        return profile.step_time(full_step(budget, max_num_seqs=max_num_seqs, context_tokens=context_tokens))

    def choose() -> int:
        return choose_token_budget(profile, tbt=tbt, max_num_seqs=max_num_seqs, context_tokens=context_tokens)

    if seconds(-(-max_num_seqs // DEFAULT_TILE) * DEFAULT_TILE) > tbt:
        with pytest.raises(ConfigError, match="TBT objective"):
            choose()
        return
    budget = choose()
    assert budget % DEFAULT_TILE == 0
    assert max_num_seqs <= budget <= LARGEST_BUDGET
    assert seconds(budget) <= tbt
    larger = budget + DEFAULT_TILE
    assert seconds(larger) > tbt or larger > LARGEST_BUDGET


def test_the_full_step_is_what_its_rows_add_up_to() -> None:
    expected = BatchShape()
    for _ in range(5):
        expected.add(70, 1, samples=True)
    assert full_step(5, max_num_seqs=5, context_tokens=70) == expected
    expected.add(70, 59, samples=True)
    assert full_step(64, max_num_seqs=5, context_tokens=70) == expected


def test_a_tile_boundary_costs_a_whole_tile() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.01, per_context=0.0, tile=256)
    assert profile.step_time(full_step(257, max_num_seqs=32, context_tokens=9)) == pytest.approx(0.03)
    assert choose_token_budget(profile, tbt=0.029, max_num_seqs=32, context_tokens=9) == 256


def test_the_last_budget_in_time_is_chosen() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.005, per_context=0.0)
    assert choose_token_budget(profile, tbt=0.1, max_num_seqs=8, context_tokens=100) == 18 * 128


def test_says_that_the_decodes_alone_take_too_long() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.0, per_context=1e-6)
    with pytest.raises(ConfigError, match=r"100 decodes .* 110\.00"):
        choose_token_budget(profile, tbt=0.1, max_num_seqs=100, context_tokens=999)


def test_says_what_the_smallest_budget_takes() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.03, per_context=0.0, tile=64)
    with pytest.raises(ConfigError, match=r"128 tokens .* 70\.00"):
        choose_token_budget(profile, tbt=0.05, max_num_seqs=60, context_tokens=10)


def test_refuses_empty_steps() -> None:
    profile = TiledProfile(fixed=0.001, per_tile=0.001, per_context=0.0)
    with pytest.raises(ConfigError, match="max_num_seqs is 0; it must be at least 1"):
        choose_token_budget(profile, tbt=1.0, max_num_seqs=0, context_tokens=1)


def test_long_answers_weigh_more_in_the_mean_context() -> None:
    assert mean_decode_context([100, 1000], [300, 100]) == round((300 * 250 + 100 * 1050) / 400)
    with pytest.raises(ConfigError, match="one request"):
        mean_decode_context([], [])
    assert mean_decode_context([100, 300], [0, 0]) == 200
