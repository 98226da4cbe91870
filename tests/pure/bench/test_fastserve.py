"""A skip-join multi-level feedback queue: entry by the first step, demotion by service, promotion."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.fastserve import FASTSERVE, QUANTUM_RATIO, STARVATION, FeedbackQueues
from onbeat.core.request import FinishReason
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.request_state import RequestState
from tests.examples import examples
from tests.pure.scheduler import timed
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request


@pytest.fixture(autouse=True, scope="module")
def registered():
    """The scheduler finds a policy of another place by its name, as soon as that stands in its table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "fastserve", FASTSERVE)
        yield


def driver_for(*requests, model: FakeStepTime | None = None, **changes) -> TimedDriver:
    driver = TimedDriver(make_config("fastserve", **changes), model or FakeStepTime())
    for request in requests:
        driver.add(request)
    return driver


def rows_of(driver: TimedDriver, index: int = -1) -> dict[str, int]:
    return {row.request_id: row.num_new_tokens for row in driver.log[index].rows}


def make_state(request_id: str, num_prompt: int) -> RequestState:
    return timed.make_state(make_request(request_id, num_prompt, 9))


class TestFeedbackQueues:
    def test_a_request_enters_the_highest_queue_that_holds_its_first_step(self):
        model = FakeStepTime()
        states = [make_state(str(num), num) for num in (1, 30, 300, 900)]
        queues = FeedbackQueues().refreshed(states, 0.0, model)
        assert queues.jobs["1"].level == 0
        assert queues.quantum(0) == pytest.approx(model.smallest_step, rel=1e-3)
        for state in states:
            level = queues.jobs[state.request_id].level
            first = model.idle_seconds(state.num_tokens, 0)
            assert queues.quantum(level) >= first * (1 - 1e-3)
            assert level == 0 or queues.quantum(level - 1) < first * (1 + 1e-3)

    def test_quanta_double(self):
        queues = FeedbackQueues().refreshed([make_state("a", 1)], 0.0, FakeStepTime())
        assert QUANTUM_RATIO == 2
        assert queues.quantum(5) == 2 * queues.quantum(4)

    def test_who_has_used_up_its_quantum_goes_down_by_one_queue(self):
        state = make_state("a", 1)
        queues = FeedbackQueues().refreshed([state], 0.0, FakeStepTime())
        levels = []
        for step in range(8):
            queues.charge([state], step, queues.quantum(0))
            levels.append(queues.jobs["a"].level)
        assert levels == [0, 1, 1, 1, 2, 2, 2, 2]

    def test_who_starves_goes_to_the_top(self):
        state = make_state("a", 1)
        queues = FeedbackQueues().refreshed([state], 0.0, FakeStepTime())
        for _ in range(20):
            queues.charge([state], 0.0, 0.1)
        assert queues.jobs["a"].level > 4
        assert queues.refreshed([state], STARVATION * 0.99, FakeStepTime()).jobs["a"].level > 4
        assert queues.refreshed([state], STARVATION, FakeStepTime()).jobs["a"].level == 0
        assert queues.jobs["a"].level > 4, "a plan that is not carried out promotes nobody"

    def test_forgets_who_is_gone(self):
        both = [make_state("a", 1), make_state("b", 1)]
        queues = FeedbackQueues().refreshed(both, 0.0, FakeStepTime())
        assert queues.jobs.keys() == {"a", "b"}
        assert queues.refreshed(both[1:], 1.0, FakeStepTime()).jobs.keys() == {"b"}


def test_a_short_prompt_passes_long_ones_that_came_before():
    driver = driver_for(
        make_request("long-1", 900, 2), make_request("long-2", 900, 2), make_request("short", 20, 2)
    )
    driver.step()
    assert next(iter(rows_of(driver))) == "short"


def test_a_new_request_takes_the_slot_of_one_that_has_had_much_service():
    driver = driver_for(make_request("old", 10, 400), max_num_seqs=1)
    for _ in range(50):
        driver.step()
    driver.add(make_request("new", 10, 2, arrival=driver.now))
    driver.step()
    assert rows_of(driver) == {"new": 10}
    driver.serve([])
    assert driver.finish_order == ["new", "old"]
    assert driver.scheduler.table.num_preemptions == 1


def test_whoever_is_passed_over_keeps_its_kv_while_there_is_room():
    budget = {"max_num_batched_tokens": 1024}
    driver = driver_for(make_request("old", 100, 400), **budget)
    for _ in range(50):
        driver.step()
    held = list(driver.scheduler.running[0].block_ids)
    for index in range(8):
        driver.add(make_request(f"new-{index}", 128, 2, arrival=driver.now))
    driver.step()
    assert rows_of(driver) == {f"new-{index}": 128 for index in range(8)}
    driver.step()
    assert "old" in rows_of(driver)
    assert driver.scheduler.running[0].block_ids[: len(held)] == held
    assert driver.scheduler.table.num_preemptions == 0


def test_the_lowest_queue_is_preempted_where_blocks_run_out():
    driver = driver_for(make_request("a", 500, 300), make_request("b", 20, 490, arrival=0.01), num_blocks=64)
    driver.serve([])
    assert driver.finished.keys() == {"a", "b"}
    assert driver.scheduler.table.num_preemptions >= 1


def test_nobody_starves_while_short_ones_keep_coming():
    """New requests that alone are more than the machine can do: the long request gets its turns."""
    model = FakeStepTime()
    tagged = make_request("tagged", 600, 20)
    others = [make_request(f"r{i}", 40, 4, arrival=i * 6e-3) for i in range(4000)]
    driver = driver_for(model=model, max_num_seqs=4)
    driver.serve([tagged, *others], until=24.0, watch="tagged")
    assert "tagged" in driver.finished
    assert len(driver.finished) < len(driver.requests), "it was no overload"


@examples(40)
@given(
    load=st.lists(
        st.tuples(st.integers(1, 900), st.integers(1, 60), st.floats(0, 0.3)), min_size=1, max_size=20
    ),
    num_blocks=st.sampled_from([64, 100, 512]),
    max_num_seqs=st.sampled_from([1, 3, 16]),
    depth=st.sampled_from([1, 2]),
)
def test_all_finish(load, num_blocks, max_num_seqs, depth):
    arrival, requests = 0.0, []
    for index, (num_prompt, num_output, gap) in enumerate(load):
        arrival += gap
        requests.append(make_request(f"r{index}", num_prompt, num_output, arrival=arrival))
    config = make_config("fastserve", num_blocks=num_blocks, max_num_seqs=max_num_seqs)
    driver = TimedDriver(config, FakeStepTime(), depth=depth)
    driver.serve(requests, until=inf)
    driver.scheduler.check_invariants()
    assert driver.finished == {request.request_id: FinishReason.LENGTH for request in requests}
