"""The token budget: a multiple of the tile, the largest that keeps the objective."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.token_budget import FullStep, choose_token_budget, mean_decode_context


class TiledProfile:
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


@settings(max_examples=100, deadline=None)
@given(
    profile=PROFILES,
    tbt=st.floats(0.02, 0.5),
    max_num_seqs=st.integers(1, 300),
    context_tokens=st.integers(1, 8000),
    tile=st.sampled_from([64, 128, 256]),
)
def test_is_the_largest_multiple_of_the_tile_that_keeps_the_objective(
    profile: TiledProfile, tbt: float, max_num_seqs: int, context_tokens: int, tile: int
) -> None:
    step = FullStep(max_num_seqs=max_num_seqs, context_tokens=context_tokens)
    smallest = -(-max_num_seqs // tile) * tile
    if profile.step_time(step.shape(smallest)) > tbt:
        with pytest.raises(ConfigError, match="no token budget keeps the TBT objective"):
            choose_token_budget(profile, step, tbt=tbt, tile=tile)
        return
    largest = 1 << 20
    budget = choose_token_budget(profile, step, tbt=tbt, tile=tile, largest=largest)
    assert budget % tile == 0
    assert budget >= max_num_seqs
    assert profile.step_time(step.shape(budget)) <= tbt
    assert profile.step_time(step.shape(budget + tile)) > tbt


def test_a_tile_boundary_costs_a_whole_tile() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.01, per_context=0.0, tile=256)
    step = FullStep(max_num_seqs=32, context_tokens=1000)
    assert profile.step_time(step.shape(257)) == pytest.approx(0.03)
    assert choose_token_budget(profile, step, tbt=0.029, tile=128) == 256


def test_stops_at_the_largest_budget() -> None:
    profile = TiledProfile(fixed=0.001, per_tile=1e-9, per_context=0.0)
    step = FullStep(max_num_seqs=8, context_tokens=100)
    assert choose_token_budget(profile, step, tbt=1.0, largest=1000) == 896


def test_a_quantile_gives_a_smaller_budget() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.005, per_context=0.0)
    step = FullStep(max_num_seqs=8, context_tokens=100)
    assert choose_token_budget(profile, step, tbt=0.1) == 18 * 128
    assert choose_token_budget(profile, step, tbt=0.1, q=0.9) == 8 * 128


def test_says_that_the_decodes_alone_take_too_long() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.0, per_context=1e-6)
    step = FullStep(max_num_seqs=100, context_tokens=999)
    with pytest.raises(ConfigError, match=r"100 decodes .* 110\.00 ms without any prompt"):
        choose_token_budget(profile, step, tbt=0.1)


def test_says_what_the_smallest_budget_takes() -> None:
    profile = TiledProfile(fixed=0.01, per_tile=0.03, per_context=0.0, tile=64)
    step = FullStep(max_num_seqs=60, context_tokens=10)
    with pytest.raises(ConfigError, match=r"the smallest one, 128 tokens .* 70\.00 ms"):
        choose_token_budget(profile, step, tbt=0.05)


@pytest.mark.parametrize(("tile", "largest"), [(0, 1024), (128, 64)])
def test_refuses_bounds_that_leave_nothing_to_choose(tile: int, largest: int) -> None:
    profile = TiledProfile(fixed=0.001, per_tile=0.001, per_context=0.0)
    with pytest.raises(ConfigError):
        choose_token_budget(
            profile, FullStep(max_num_seqs=8, context_tokens=1), tbt=1.0, tile=tile, largest=largest
        )


def test_long_answers_weigh_more_in_the_mean_context() -> None:
    assert mean_decode_context([100, 1000], [300, 100]) == round((300 * 250 + 100 * 1050) / 400)
    with pytest.raises(ConfigError, match="at least one request"):
        mean_decode_context([], [])
