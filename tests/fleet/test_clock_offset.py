"""Times of another machine, told by this one's clock."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cluster.clock_offset import ClockOffset, by_our_clock, by_their_clock, clock_id
from onbeat.core.fleet import ReplicaLoad
from onbeat.core.protocols import EnginePulse, StepOutputs
from onbeat.core.request import Request, RequestOutput
from onbeat.core.step import BatchShape
from onbeat.core.step_stats import StepStats
from onbeat.engine.messages import Heartbeat, Leaving, Stepped, in_portions

DELAYS = st.floats(0.0, 0.5)


@given(
    behind=st.floats(-1e6, 1e6),
    trips=st.lists(st.tuples(DELAYS, DELAYS, st.floats(0.0, 100.0)), min_size=1, max_size=20),
)
def test_the_error_is_within_what_is_said_of_it(behind, trips) -> None:
    clock, now = ClockOffset(), 50.0
    for there, back, pause in trips:
        clock.add(now, now + there - behind, now + there + back)
        now += there + back + pause
        assert abs(clock.seconds - behind) <= clock.error(now) + 1e-6
    assert clock.error(now) <= min(there + back for there, back, _ in trips) / 2 + 50e-6 * (now - 50.0) + 1e-9


def test_a_long_round_trip_replaces_a_short_one_only_once_that_is_old() -> None:
    clock = ClockOffset()
    clock.add(0.0, 10.0005, 0.001)
    clock.add(1.0, 11.09, 1.1)
    assert clock.seconds == pytest.approx(-10.0)
    clock.add(4000.0, 4010.3, 4000.1)  # the clocks came apart by a quarter of a second
    assert clock.seconds == pytest.approx(-10.25)


def test_a_clock_that_is_known_is_not_measured() -> None:
    clock = ClockOffset(0.0)
    clock.add(5.0, 1000.0, 5.1)
    assert (clock.seconds, clock.error(1e9)) == (0.0, 0.0)
    assert clock_id() == clock_id() != ""


def test_a_request_and_its_deliveries_keep_their_times() -> None:
    request = Request(request_id="a", prompt_token_ids=(1,), arrival=100.0, first_token_time=101.0)
    theirs = by_their_clock(request, 40.0)
    assert (theirs.arrival, theirs.first_token_time) == (60.0, 61.0)
    assert dataclasses.replace(theirs, arrival=100.0, first_token_time=101.0) == request
    assert by_their_clock(dataclasses.replace(request, first_token_time=None), 40.0).first_token_time is None


def _stepped(now: float) -> Stepped:
    stats = StepStats(
        step_id=1,
        start=now - 1,
        end=now,
        shape=BatchShape(),
        num_running=1,
        num_waiting=0,
        num_blocks=1,
        num_used_blocks=1,
        num_preemptions=0,
        num_prefix_queries=0,
        num_prefix_hits=0,
        schedule_seconds=0.0,
        update_seconds=0.0,
    )
    outputs = [RequestOutput("a", [1], scheduled_time=now - 2), RequestOutput("b", [], scheduled_time=-1.0)]
    return next(in_portions(StepOutputs(now, outputs, stats, ReplicaLoad(time=now, num_taken=1))))


@pytest.mark.parametrize(("received", "now"), [(103.0, 100.0), (99.5, 99.5)])
def test_a_step_has_the_times_of_this_clock_and_none_to_come(received: float, now: float) -> None:
    message = by_our_clock(_stepped(60.0), 40.0, received)
    assert isinstance(message, Stepped)
    outputs = message.outputs
    assert outputs.stats is not None
    assert outputs.load is not None
    assert (outputs.now, outputs.stats.start, outputs.stats.end) == (now, now - 1, now)
    assert [output.scheduled_time for output in outputs.outputs] == [now - 2, -1.0]
    assert outputs.load.time == now


def test_a_heartbeat_too_and_other_words_have_no_times() -> None:
    heartbeat = by_our_clock(Heartbeat(EnginePulse(60.0, 59.0, 2.0), 7), 40.0, 200.0)
    assert heartbeat == Heartbeat(EnginePulse(100.0, 99.0, 2.0), 7)
    assert by_our_clock(Leaving(), 40.0, 200.0) == Leaving()
