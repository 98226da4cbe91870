"""What a scheduler tells of its load, whatever its policy."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import RequestRejected
from onbeat.core.fleet import MOST_BACKLOG_ENTRIES, ReplicaLoad
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.triage import CostModel
from tests.examples import examples
from tests.pure.scheduler import timed
from tests.pure.scheduler.driver import POLICY_NAMES, Driver, make_config, make_request, sent_tokens
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver

COST_MODEL = CostModel(FakeStepTime(), None)
SLOS = (SLO(ttft=0.3, tbt=0.05), None, SLO(ttft=5.0), SLO(tbt=0.02), SLO(ttft=1e-3, tbt=0.1))


def all_work(driver: Driver) -> float:
    """Return the seconds of prefill work of all that waits, as it was queued, or is in its prompt."""
    scheduler = driver.scheduler
    waiting = sum(COST_MODEL.of_sums(*state.queued_work) for state in scheduler.waiting)
    running = [(state.num_wanted_tokens, state.num_computed_tokens) for state in scheduler.running]
    prompts = [(num_new, num_cached) for num_new, num_cached in running if num_new > 1]
    return waiting + sum(COST_MODEL.seconds(*prompt) for prompt in prompts)


def told_work(load: ReplicaLoad) -> float:
    return sum(seconds for _, seconds, _ in load.backlog) + load.best_effort_work


def check(driver: Driver, load: ReplicaLoad) -> None:
    scheduler = driver.scheduler
    decodes = [state for state in scheduler.running if state.num_wanted_tokens == 1]
    assert (load.num_running, load.num_waiting) == (len(scheduler.running), len(scheduler.waiting))
    assert load.num_decodes == len(decodes)
    assert load.num_context_tokens == sum(state.num_computed_tokens + 1 for state in decodes)
    pool = scheduler.kv.pool
    assert load.num_free_blocks == pool.num_blocks - pool.num_used_blocks
    num_queued_tokens = sum(state.queued_work[0] for state in scheduler.waiting)
    assert load.num_queued_blocks == scheduler.kv.num_blocks_for(num_queued_tokens)
    assert len(load.backlog) <= MOST_BACKLOG_ENTRIES
    assert list(load.backlog) == sorted(load.backlog)
    assert told_work(load) == pytest.approx(all_work(driver))
    assert sum(num for _, _, num in load.backlog) <= load.num_waiting
    assert 0 < load.prefill_share <= 1
    assert load.full_seconds >= load.decode_seconds * (1 - 1e-9) > 0
    assert load.costs is not None


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("depth", [1, 2])
@examples(10)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 200), st.integers(1, 20), st.sampled_from(SLOS), st.integers(0, 19)),
        min_size=1,
        max_size=40,
    )
)
def test_it_adds_up_at_each_step(policy, depth, requests):
    driver = TimedDriver(make_config(policy, num_blocks=32), FakeStepTime(), depth=depth)
    for index, (num_prompt, max_tokens, slo, num_sent) in enumerate(requests):
        name = f"r{index}"
        sent = sent_tokens(name, num_prompt, min(num_sent, max_tokens - 1))
        driver.add(timed.make_request(name, num_prompt, max_tokens, slo=slo, arrival=driver.now, **sent))
        driver.step()
        check(driver, driver.scheduler.load(driver.now))
    assert driver.scheduler.load(driver.now).num_taken == len(requests)
    driver.serve([])
    load = driver.scheduler.load(driver.now)
    assert (load.num_running, load.num_waiting, told_work(load)) == (0, 0, 0.0)
    assert load.tightest_tbt == inf


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_to_be_asked_changes_no_plan(policy):
    logs = []
    for is_asked in (False, True):
        driver = TimedDriver(make_config(policy, num_blocks=20), FakeStepTime())
        for index in range(20):
            slo = SLOS[index % len(SLOS)]
            driver.add(timed.make_request(f"r{index}", 30 + 9 * index, 12, slo=slo, arrival=driver.now))
            driver.step()
            if is_asked:
                driver.scheduler.load(driver.now)
        driver.serve([])
        logs.append(driver.log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("policy", [name for name in POLICIES if not POLICIES[name].needs_step_time])
def test_without_predictions_there_are_counts_alone(policy):
    scheduler = Scheduler(make_config(policy))
    scheduler.add(make_request("r", 100, 4))
    load = scheduler.load(1.0, busy=0.5)
    assert (load.time, load.busy, load.num_waiting, load.num_taken) == (1.0, 0.5, 1, 1)
    assert load.costs is None
    assert (load.backlog, load.best_effort_work, load.prefill_share) == (((0.0, 0.0, 1),), 0.0, 1.0)


def test_those_that_were_not_taken_count_as_taken_notice_of():
    scheduler = Scheduler(make_config())
    scheduler.add(make_request("r", 10, 4))
    for bad in (make_request("r", 10, 4), make_request("long", 999, 4)):
        with pytest.raises(RequestRejected):
            scheduler.add(bad)
    load = scheduler.load(1.0)
    assert (load.num_taken, load.num_waiting) == (3, 1)


def test_who_goes_by_arrival_has_all_of_it_before_the_next():
    driver = TimedDriver(make_config("sarathi"), FakeStepTime())
    for index in range(30):
        driver.add(timed.make_request(f"r{index}", 100, 4, slo=SLO(ttft=1.0 + index)))
    load = driver.scheduler.load(0.0)
    assert load.backlog == ((0.0, pytest.approx(30 * COST_MODEL.seconds(100, 0)), 30),)
    assert load.best_effort_work == 0.0


@pytest.mark.parametrize("num_prompts", [10, 40, 300])
def test_work_is_told_by_deadline(num_prompts):
    driver = TimedDriver(timed.make_config(), FakeStepTime())
    driver.now = 2.0
    for index in range(num_prompts):
        slo = SLO(ttft=100.0 + index)
        driver.add(timed.make_request(f"r{index}", 100, 4, slo=slo, arrival=1.0, shed=ShedMode.OFF))
    driver.add(timed.make_request("none", 200, 4, arrival=1.0))
    load = driver.scheduler.load(3.0)
    each = COST_MODEL.seconds(100, 0)
    assert load.best_effort_work == pytest.approx(COST_MODEL.seconds(200, 0))
    assert told_work(load) == pytest.approx(num_prompts * each + COST_MODEL.seconds(200, 0))
    if num_prompts == 10:
        assert load.backlog == tuple((98.0 + index, pytest.approx(each), 1) for index in range(10))
    due = 98.0 + 20
    if num_prompts == 40:  # in threes
        before = [entry for entry in load.backlog if entry[0] <= due]
        assert sum(seconds for _, seconds, _ in before) == pytest.approx(21 * each)
        assert sum(num for _, _, num in before) == 21
    if num_prompts == 300:  # beyond those that a plan looks at it is one sum
        assert load.backlog[-1][0] == 98.0 + 127
        assert load.backlog[-1][1] > 100 * each
    assert sum(num for _, _, num in load.backlog) == num_prompts


def test_streams_and_the_blocks_that_the_first_lacks():
    driver = TimedDriver(timed.make_config(num_blocks=20, max_model_len=256), FakeStepTime())
    driver.add(timed.make_request("a", 160, 40, slo=SLO(ttft=1.0, tbt=0.1)))
    driver.add(timed.make_request("b", 100, 40, slo=SLO(ttft=1.0, tbt=0.03)))
    for _ in range(3):
        driver.step()
    driver.add(timed.make_request("c", 160, 4, slo=SLO(ttft=9.0)))
    load = driver.scheduler.load(driver.now)
    assert (load.num_decodes, load.num_context_tokens) == (2, 160 + 100 + 2 * 3)
    assert load.tightest_tbt == 0.03
    assert load.num_free_blocks == 20 - 11 - 7
    assert load.num_wanted_blocks == 10 - 2
    assert load.num_queued_blocks == 10
    assert 0 < load.prefill_share < 1


def test_costs_are_those_of_the_model_as_it_learns():
    class Learning(FakeStepTime):
        def observe(self, shape, seconds):
            self.per_token = 4e-4

    driver = TimedDriver(make_config("sarathi"), Learning())
    first = driver.scheduler.load(0.0).costs
    assert first is not None
    assert first.token == pytest.approx(1e-4, rel=0.1)
    driver.add(timed.make_request("a", 20, 60))
    for _ in range(40):
        driver.step()
        load = driver.scheduler.load(driver.now)
    assert load.costs is not None
    assert load.costs.token == pytest.approx(4e-4, rel=0.1)
