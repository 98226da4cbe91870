"""How long requests are predicted to wait that nothing hurries, and who is not taken for it."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError, Overloaded
from onbeat.core.request import FinishReason
from onbeat.core.slo import SLO, ShedMode
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.token_budget import queue_seconds
from tests.pure.scheduler.timed import FakeStepTime, TimedDriver, make_config, make_request

SLOTS = 4
PROMPT = 1000
SECONDS = 0.15
"""About what such a prompt takes of the machine."""
BOUND = 3.0


def make_driver(bound: float | None = BOUND, *, model: FakeStepTime | None = None, **changes) -> TimedDriver:
    limits = {"max_num_seqs": SLOTS, "max_queue_seconds": bound, "num_blocks": 4096} | changes
    return TimedDriver(make_config(**limits), model or FakeStepTime())


def flood(driver: TimedDriver, count: int, *, max_tokens: int = 2, **changes) -> list[str]:
    """Let so many prompts come now; return those who were not taken."""
    names = [f"r{len(driver.requests) + index}" for index in range(count)]
    for name in names:
        driver.add(make_request(name, PROMPT, max_tokens, arrival=driver.now, **changes))
    return [name for name in names if name in driver.rejected]


def wait_of(driver: TimedDriver, name: str) -> float:
    return driver.times[name][0] - driver.requests[name].arrival


def queue_of(driver: TimedDriver) -> float:
    state = driver.scheduler.planner.state()
    assert state is not None
    return state.queue_seconds


@pytest.mark.parametrize("num_output", [2, 60], ids=["bound by prompts", "bound by slots"])
@pytest.mark.parametrize("slo", [None, SLO(tbt=5.0)], ids=["no objective", "no TTFT objective"])
def test_a_flood_is_taken_up_to_the_bound_and_no_further(num_output, slo):
    driver = make_driver()
    flood(driver, 8, max_tokens=num_output, slo=slo)
    while driver.now < 4.0:  # by now the pace is known
        driver.step()
        flood(driver, 1, max_tokens=num_output, slo=slo)
    taken = [name for name in driver.requests if name not in driver.rejected]
    assert driver.rejected
    driver.serve([])
    longest = max(wait_of(driver, name) for name in taken)
    assert 0.7 * BOUND < longest < 1.4 * BOUND + SECONDS


@pytest.mark.parametrize("slo", [None, SLO(ttft=1.0)], ids=["best effort", "deadlines"])
def test_an_idle_time_after_those_who_waited_have_left_is_nobodys_wait(slo):
    driver = make_driver(60.0)
    flood(driver, 4 * SLOTS, max_tokens=40, slo=slo)
    for _ in range(20):
        driver.step()
    for name in driver.requests:
        driver.abort(name)
    driver.now += 600.0
    flood(driver, 1)
    for _ in range(3):
        driver.step()
    flood(driver, 3 * SLOTS)
    assert queue_of(driver) < 5 * 3 * SLOTS * SECONDS


def test_without_a_bound_all_are_taken():
    driver = make_driver(None)
    assert not flood(driver, 200)
    driver.serve([])
    assert max(wait_of(driver, name) for name in driver.requests) > 5 * BOUND


def test_a_queue_shorter_than_the_slots_takes_anybody():
    driver = make_driver(0.01)
    assert flood(driver, SLOTS + 2) == [f"r{SLOTS}", f"r{SLOTS + 1}"]
    driver.step()
    assert len(driver.scheduler.waiting) < SLOTS
    assert len(flood(driver, 1)) == 0


def test_a_lone_request_is_taken_however_long_it_takes():
    driver = make_driver(0.01, model=FakeStepTime(per_token=10.0))
    assert not flood(driver, 1)
    driver.serve([])
    assert wait_of(driver, "r0") > 1000.0


def test_the_newest_are_refused_and_those_taken_are_served():
    driver = make_driver()
    refused = flood(driver, 60)
    assert refused == [f"r{index}" for index in range(60 - len(refused), 60)]
    driver.serve([])
    assert driver.finished == {
        name: FinishReason.LENGTH for name in driver.requests if name not in driver.rejected
    }


def test_retry_after_is_when_there_is_room():
    """The machine turns out slower than believed, so that the wait is above the bound."""
    driver = make_driver(8.0)
    flood(driver, 50)
    slow = FakeStepTime(fixed=3e-3, per_token=1.5e-4, per_context=1.5e-7, per_pair=1.5e-7)
    driver.model = slow  # what steps take; the scheduler still believes otherwise
    while driver.now < 1.0:
        driver.step()
    (name,) = flood(driver, 1)
    error = driver.rejected[name]
    assert isinstance(error, Overloaded)
    assert error.code == "server_overloaded"
    assert error.retry_after is not None
    told, start = error.retry_after, driver.now
    assert told > 1.0
    while flood(driver, 1):
        driver.step()
    assert not driver.finished.keys() & {"r49"}, "nobody was ended for it"
    assert 0.5 * told < driver.now - start < 2.0 * told


def test_prompts_that_can_be_in_time_are_taken_whatever_waits():
    driver = make_driver()
    assert flood(driver, 60)
    assert not flood(driver, 3, slo=SLO(ttft=4.0), shed=ShedMode.RELEGATE)
    last = list(driver.requests)[-3:]
    driver.serve([])
    assert all(wait_of(driver, name) < 4.0 for name in last)


def test_one_that_would_be_left_behind_is_refused_at_once():
    driver = make_driver()
    flood(driver, 60)
    assert flood(driver, 1, slo=SLO(ttft=0.05), shed=ShedMode.RELEGATE)
    assert driver.scheduler.planner.state().num_rejected == {"queue_too_long": len(driver.rejected)}


def test_one_that_turns_out_late_does_not_join_a_queue_that_is_too_long():
    driver = make_driver()
    slo = SLO(ttft=1.0)
    assert not flood(driver, 5, slo=slo, shed=ShedMode.RELEGATE)
    flood(driver, 60)
    driver.model = FakeStepTime(fixed=2.0)  # the machine stalls
    driver.step()
    driver.step()
    driver.model = FakeStepTime()
    assert driver.step()
    ended = {name for name, reason in driver.finished.items() if reason is FinishReason.EXPIRED}
    assert ended <= {f"r{index}" for index in range(5)}
    assert ended
    outputs = [driver.outputs[name] for name in ended]
    assert outputs == [[]] * len(ended)
    driver.serve([])
    driver.scheduler.check_invariants()


def test_shed_off_keeps_its_turn_but_waits_no_longer_either():
    driver = make_driver()
    flood(driver, 100, slo=SLO(ttft=0.1), shed=ShedMode.OFF)
    assert driver.rejected
    taken = [name for name in driver.requests if name not in driver.rejected]
    driver.serve([])
    assert 0.7 * BOUND < max(wait_of(driver, name) for name in taken) < 1.4 * BOUND + SECONDS


def test_best_effort_that_deadlines_overtake_for_ever_is_ended():
    """Predictions cannot know who comes later: the wait ends at 1.5 times the bound."""
    driver = make_driver(1.0, max_num_seqs=16)
    flood(driver, 10)
    waiting = list(driver.requests)
    ends = {}
    while driver.now < 4.0:
        while len(driver.scheduler.waiting) < 30:
            flood(driver, 1, slo=SLO(ttft=2.0, tbt=1.0), shed=ShedMode.RELEGATE)
            if driver.rejected:
                break
        driver.step()
        for name in waiting:
            if driver.finished.get(name) is FinishReason.EXPIRED:
                ends.setdefault(name, driver.now)
    assert ends
    assert all(1.5 <= end <= 1.5 + 3 * SECONDS for end in ends.values())
    begun = [name for name in waiting if name not in ends and driver.times[name]]
    assert all(wait_of(driver, name) <= 1.5 + 5 * SECONDS for name in begun)


def test_the_gauge_is_what_the_next_one_waits():
    driver = make_driver(None)
    flood(driver, 40)
    for _ in range(30):
        driver.step()
    predicted = queue_of(driver)
    flood(driver, 1)
    last = list(driver.requests)[-1]
    driver.serve([])
    assert predicted == pytest.approx(wait_of(driver, last), rel=0.3)
    assert queue_of(driver) == 0.0


def test_a_policy_that_predicts_no_waits_has_no_bound():
    assert queue_seconds("slo", None) == 60.0
    assert (queue_seconds("slo", 0.0), queue_seconds("slo", 5.0)) == (None, 5.0)
    for name in POLICIES:
        if not POLICIES[name].predicts_waits:
            assert queue_seconds(name, None) is None
    config = make_config("sarathi", max_queue_seconds=5.0)
    with pytest.raises(ConfigError, match="max_num_queued_reqs"):
        Scheduler(config)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bound_is_a_number_of_seconds(value):
    with pytest.raises(ConfigError, match="max_queue_seconds is"):
        make_config(max_queue_seconds=value)


@pytest.mark.parametrize("is_served", [False, True], ids=["nobody meanwhile", "a few meanwhile"])
def test_an_overload_that_is_long_past_refuses_nobody(is_served):
    """The pace of best effort beside many deadlines is no pace of an idle replica."""
    driver = make_driver(60.0, max_num_seqs=16)
    hurried = [
        make_request(f"h{i}", PROMPT, 2, slo=SLO(ttft=1.0), shed=ShedMode.REJECT, arrival=0.1 * i)
        for i in range(400)
    ]
    others = [make_request(f"o{i}", PROMPT, 2, arrival=0.5 * i) for i in range(40)]
    driver.serve([*hurried, *others], until=40.0)
    for name in [name for name in driver.outputs if name not in driver.finished]:
        driver.abort(name)
    driver.serve([])
    if is_served:
        driver.serve(make_request(f"m{i}", PROMPT, 2, arrival=driver.now + 10.0 * i) for i in range(60))
    driver.now += 600.0
    assert not flood(driver, 300)
