"""The waiting queue against a sorted list, with so many requests that its buckets split and empty."""

from __future__ import annotations

from bisect import insort
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onbeat.scheduler.replica import step_plan
from onbeat.scheduler.replica.request_state import BEST_EFFORT_RANK, RequestState
from onbeat.scheduler.replica.step_plan import WaitingQueue
from tests.examples import examples
from tests.pure.scheduler.timed import make_request, make_state

BUCKET = step_plan._MOST_IN_BUCKET


def rank_of(number: int) -> float:
    """Return a rank, of best effort for one of three."""
    return float(number) if number <= 20 else BEST_EFFORT_RANK


ranks = st.integers(0, 30).map(rank_of)


def make_waiting(rank: float, index: int, num_prompt: int = 10, num_hit: int = 0) -> RequestState:
    state = make_state(make_request(f"r{index}", num_prompt, 1), sort_key=(rank, 0.0, index))
    state.num_hit_tokens = num_hit
    return state


def work_of(states: list[RequestState]) -> tuple[int, float]:
    """Sum up, token by token, how many each request computes and what these attend to."""
    num_tokens, num_pairs = 0, 0.0
    for state in states:
        num_new = state.num_tokens - state.num_hit_tokens
        num_tokens += num_new
        num_pairs += num_new * state.num_hit_tokens + num_new * num_new / 2
    return num_tokens, num_pairs


def work_below(queue: WaitingQueue, rank: float) -> tuple[int, float]:
    below = queue.ranked.below(rank)
    return below.num_tokens, below.num_pairs


def check_alike(queue: WaitingQueue, model: list[RequestState], rank: float, most: int) -> None:
    ranked = [state for state in model if state.sort_key[0] < BEST_EFFORT_RANK]
    below = [state for state in ranked if state.sort_key[0] < rank]
    assert list(queue) == model
    assert len(queue) == len(model)
    assert queue.num_prompt_tokens == sum(state.num_prompt_tokens for state in model)
    assert queue.ranked.below(rank).num_requests == len(below)
    assert queue.ranked.first(most) == ranked[:most]
    assert queue.best_effort.first(most) == model[len(ranked) :][:most]
    assert work_below(queue, rank) == work_of(below)
    assert queue.peek(most) is (model[most] if most < len(model) else None)


class QueueMachine(RuleBasedStateMachine):
    """Requests come and go one by one and in crowds."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.model: list[RequestState] = []
        self.num_made = 0

    def push(self, rank: float, num_prompt: int, num_hit: int) -> None:
        state = make_waiting(rank, self.num_made, num_prompt, min(num_hit, num_prompt))
        self.num_made += 1
        self.queue.push(state)
        insort(self.model, state, key=lambda each: each.sort_key)

    @rule(rank=ranks, num_prompt=st.integers(1, 50), num_hit=st.integers(0, 50))
    def arrive(self, rank, num_prompt, num_hit):
        self.push(rank, num_prompt, num_hit)

    @rule(seed=st.integers(0, 99), count=st.integers(1, BUCKET + 100))
    def crowd(self, seed, count):
        rng = Random(seed)
        for _ in range(count):
            self.push(rank_of(rng.randrange(31)), rng.randrange(1, 9), rng.randrange(9))

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 99), part=st.floats(0, 1))
    def leave(self, seed, part):
        rng = Random(seed)
        for _ in range(max(1, int(part * len(self.model)))):
            self.queue.remove(self.model.pop(rng.randrange(len(self.model))))

    @precondition(lambda self: self.model)
    @rule(part=st.floats(0, 1))
    def serve_the_first(self, part):
        for _ in range(max(1, int(part * len(self.model)))):
            assert self.queue.peek() is self.model[0]
            self.queue.remove(self.model.pop(0))

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 99), rank=ranks)
    def move_to_another_place(self, seed, rank):
        state = self.model.pop(Random(seed).randrange(len(self.model)))
        self.queue.remove(state)
        state.sort_key = (rank, *state.sort_key[1:])
        self.queue.push(state)
        insort(self.model, state, key=lambda each: each.sort_key)

    @rule(rank=ranks | st.just(inf) | st.just(-1.0), most=st.integers(0, 2 * BUCKET))
    def ask(self, rank, most):
        check_alike(self.queue, self.model, rank, most)

    @invariant()
    def is_bounded(self):
        parts = self.queue.ranked.buckets, self.queue.best_effort.buckets
        sizes = [[len(bucket.items) for bucket in part] for part in parts]
        assert all(len(part) == 1 or min(part) > 0 for part in sizes)
        assert max(map(max, sizes)) <= BUCKET
        assert sum(map(sum, sizes)) == len(self.queue) == len(self.model)

    def teardown(self):
        check_alike(self.queue, self.model, 15.0, 10)


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = examples(60, stateful_step_count=20)


@given(st.lists(ranks, max_size=60), ranks, st.integers(0, 70))
def test_few_requests(all_ranks, rank, most):
    queue, model = WaitingQueue(), []
    for index, each in enumerate(all_ranks):
        state = make_waiting(each, index)
        queue.push(state)
        insort(model, state, key=lambda waiting: waiting.sort_key)
    check_alike(queue, model, rank, most)


def test_of_one_rank_whoever_came_first_is_first_beyond_a_bucket():
    queue = WaitingQueue()
    states = [make_waiting(1.0, index) for index in range(3 * BUCKET)]
    for state in Random(0).sample(states, len(states)):
        queue.push(state)
    assert list(queue) == states
    assert queue.ranked.below(1.0).num_requests == 0
    assert queue.ranked.first(2 * BUCKET) == states[: 2 * BUCKET]


def test_work_is_that_of_when_it_began_to_wait():
    """What the cache holds is looked at again as it waits; the sums must come back to nothing."""
    queue, state = WaitingQueue(), make_waiting(1.0, 0, num_prompt=100, num_hit=30)
    queue.push(state)
    state.num_hit_tokens = 80
    assert work_below(queue, inf) == (70, 70 * 30 + 70 * 70 / 2)
    queue.push(other := make_waiting(2.0, 1))
    queue.remove(state)
    assert work_below(queue, inf) == work_of([other])
    queue.push(state)
    assert work_below(queue, 2.0) == (20, 20 * 80 + 20 * 20 / 2)


def test_finding_a_place_takes_a_bisection():
    """Not a look at all that wait: counted are the keys that are compared."""

    class Key(tuple):
        num_compared = 0

        def __lt__(self, other):
            Key.num_compared += 1
            return tuple.__lt__(self, other)

    queue = WaitingQueue()
    for index in range(20_000):
        queue.push(make_waiting(float(index * 7919 % 20_000), index, num_prompt=1))
    for state in queue:
        state.sort_key = Key(state.sort_key)
    new = make_waiting(1e4 + 0.5, 20_000)
    new.sort_key = Key(new.sort_key)
    queue.push(new)
    queue.remove(new)
    assert Key.num_compared < 80


def test_removing_one_that_is_not_there_is_noticed():
    queue = WaitingQueue()
    queue.push(make_waiting(1.0, 0))
    with pytest.raises(AssertionError, match="unique"):
        queue.remove(make_waiting(1.0, 0))
