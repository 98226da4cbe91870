"""Whom to preempt: blocks won for the time that winning them back costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.preemption_cost import Candidate, choose_victim, recompute_seconds


def seconds(cached_tokens: int, num_tokens: int) -> float:
    return 0.01 + num_tokens * (1e-4 + 1e-8 * cached_tokens)


def make_candidate(**changes) -> Candidate:
    values = {"context_tokens": 1000, "cached_tokens": 0, "freed_blocks": 62, "arrival": 0.0}
    return Candidate(**(values | changes))


def choose(*candidates: Candidate, **options) -> int | None:
    return choose_victim(candidates, seconds, **options)


def test_nobody_to_choose() -> None:
    assert choose() is None
    assert choose(make_candidate(freed_blocks=0)) is None


def test_more_blocks_for_the_same_time() -> None:
    assert choose(make_candidate(freed_blocks=10), make_candidate(freed_blocks=60)) == 1


def test_less_time_for_the_same_blocks() -> None:
    assert choose(make_candidate(), make_candidate(cached_tokens=500)) == 1
    assert choose(make_candidate(context_tokens=900), make_candidate()) == 0


def test_best_effort_goes_first_however_dear() -> None:
    cheap = make_candidate(freed_blocks=100)
    assert choose(cheap, make_candidate(freed_blocks=1, is_best_effort=True)) == 1


def test_who_would_miss_its_deadline_is_dearer() -> None:
    late = make_candidate(slack_after_resume=-0.001)
    assert choose(late, make_candidate(slack_after_resume=0.0, freed_blocks=10)) == 1
    assert choose(late, make_candidate(slack_after_resume=0.0, freed_blocks=10), miss_seconds=0.0) == 0


def test_weight_is_what_it_costs() -> None:
    assert choose(make_candidate(weight=2.0), make_candidate(weight=1.0)) == 1
    assert choose(make_candidate(weight=2.0, freed_blocks=62), make_candidate(freed_blocks=30)) == 0


@pytest.mark.parametrize("spared", [{"progress": 0.95}, {"was_preempted_recently": True}])
@pytest.mark.parametrize("is_best_effort", [False, True])
def test_spares_who_is_nearly_done_or_was_preempted_a_moment_ago(
    spared: dict[str, float], is_best_effort: bool
) -> None:
    spared_one = make_candidate(freed_blocks=1000, is_best_effort=is_best_effort, **spared)
    assert choose(spared_one, make_candidate(freed_blocks=1)) == 1
    assert choose(spared_one, make_candidate(freed_blocks=0)) == 0, "nobody else"
    assert choose(spared_one) == 0


def test_the_latest_of_equal_ones() -> None:
    assert choose(*(make_candidate(arrival=arrival) for arrival in (2.0, 3.0, 1.0))) == 1
    assert choose(*(make_candidate(arrival=-arrival) for arrival in (2.0, 3.0, 1.0))) == 2


candidates = st.builds(
    Candidate,
    context_tokens=st.integers(1, 10_000),
    cached_tokens=st.integers(0, 1_000),
    freed_blocks=st.integers(0, 600),
    arrival=st.floats(0, 100),
    is_best_effort=st.booleans(),
    progress=st.floats(0, 1),
    was_preempted_recently=st.booleans(),
    weight=st.floats(0.1, 10),
    slack_after_resume=st.one_of(st.just(math.inf), st.floats(-1, 1)),
)


@given(pool=st.lists(candidates, max_size=8, unique_by=lambda each: each.arrival), data=st.data())
def test_the_choice_is_among_the_useful_and_does_not_depend_on_the_order(
    pool: list[Candidate], data: st.DataObject
) -> None:
    chosen = choose(*pool)
    if not any(each.freed_blocks for each in pool):
        assert chosen is None
        return
    assert chosen is not None
    assert pool[chosen].freed_blocks > 0
    other = data.draw(st.permutations(pool))
    index = choose(*other)
    assert index is not None
    assert other[index] == pool[chosen]


@dataclass
class Recorder:
    """A step-time model that remembers what it was asked."""

    shape: BatchShape | None = None
    q: float | None = None

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        self.shape, self.q = shape, q
        return 0.25

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        raise NotImplementedError

    def observe(self, shape: BatchShape, seconds: float) -> None: ...


def test_lost_tokens_are_computed_in_one_chunk_behind_those_that_are_cached() -> None:
    model = Recorder()
    assert recompute_seconds(model, 64, 100, q=0.9) == 0.25
    expected = BatchShape()
    expected.add(64, 100, samples=True)
    assert (model.shape, model.q) == (expected, 0.9)
    recompute_seconds(model, 64, 0)
    assert model.shape is not None
    assert model.shape.num_new_tokens == 1
    assert choose_victim([make_candidate()], partial(recompute_seconds, model)) == 0
