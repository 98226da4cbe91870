"""A fleet that changes its own size: by the work that arrives, what is late, and how much memory is free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.policies.llumnix import freeness
from onbeat.core.fleet import ReplicaLoad
from onbeat.scheduler.cluster.events import (
    Lost,
    Refuse,
    Reported,
    Rescale,
    ScaleAsked,
    ScalingAsked,
    Start,
    Stop,
)
from onbeat.scheduler.cluster.membership import ReplicaState
from tests.examples import examples
from tests.owners import owner_of
from tests.pure.scheduler.scaled import START_SECONDS, Scaled

pytestmark = pytest.mark.usefixtures("comparators")


@pytest.mark.parametrize("rate", [0.5, 4.0, 9.0, 14.0])
def test_constant_load_changes_nothing_once_the_size_is_found(rate: float) -> None:
    scaled = Scaled(1, 4)
    rng = random.Random(1)
    scaled.offer(rate, 300, rng)
    num_before = len(scaled.changes)
    scaled.offer(rate, 1500, rng)
    assert len(scaled.changes) <= num_before + 1, scaled.changes
    load = 0.1 * rate
    assert load / scaled.num_expected < 0.95 or scaled.num_expected == 4
    assert load / max(1, scaled.num_expected - 1) > 0.5 or scaled.num_expected == 1, "not too many either"


@examples(40)
@given(
    least=st.integers(0, 2),
    extra=st.integers(1, 3),
    rates=st.lists(st.sampled_from([0.05, 2.0, 9.0, 30.0]), min_size=1, max_size=3),
    policy=st.sampled_from(["objective", "freeness"]),
    seed=st.integers(0, 99),
)
def test_a_fleet_keeps_within_its_bounds(
    least: int, extra: int, rates: list[float], policy: str, seed: int
) -> None:
    scaled = Scaled(least, least + extra, policy=policy, down_seconds=60)
    rng = random.Random(seed)
    for rate in rates:
        scaled.offer(rate, 90, rng)
        assert least <= scaled.num_expected <= max(1, least + extra)
    for change in scaled.changes:
        assert least <= change.num_replicas <= least + extra
        assert change.num_replicas != change.num_before


def test_there_are_enough_for_a_load_that_has_grown() -> None:
    scaled = Scaled(1, 6)
    rng = random.Random(5)
    scaled.offer(5, 600, rng)
    assert scaled.num_expected == 1
    scaled.offer(35, 120, rng)
    assert scaled.num_expected >= 4, scaled.changes
    scaled.offer(35, 300, rng)
    assert scaled.num(ReplicaState.READY) >= 4
    assert {change.why for change in scaled.changes} == {"work"}
    scaling = scaled.fleet.scaling
    assert scaling is not None
    assert scaling.share is not None
    assert 0.5 < scaling.share < 1.0
    assert (scaling.num_wanted, scaling.policy) == (scaled.num_expected, "objective")


def test_it_shrinks_one_by_one_to_the_minimum_once_nobody_asks() -> None:
    scaled = Scaled(1, 4)
    scaled.offer(30, 300, random.Random(3))
    assert scaled.num_expected >= 3
    scaled.run(scaled.now + 590)
    num_before = scaled.num_expected
    assert num_before >= 3, "the worst minute of the last ten still counts"
    scaled.run(scaled.now + 400)
    assert scaled.num_expected == 1
    downs = [change for change in scaled.changes if change.why == "spare"]
    assert [change.num_replicas for change in downs] == list(range(num_before - 1, 0, -1))


def test_from_zero_the_first_request_starts_a_replica_and_waits_for_it() -> None:
    scaled = Scaled(0, 2, down_seconds=30)
    scaled.run(START_SECONDS)
    assert scaled.num(ReplicaState.READY) == 1
    scaled.run(100)
    assert scaled.num_expected == 0, "nobody has asked for half a minute"
    assert [(change.num_replicas, change.why) for change in scaled.changes] == [(0, "spare")]
    scaled.send()
    assert [type(each) for each in scaled.actions] == [Rescale, Start]
    assert scaled.changes[-1].why == "arrival"
    assert scaled.fleet.num_waiting == 1
    scaled.send()
    assert scaled.actions == [], "it is started once"
    scaled.run(scaled.now + START_SECONDS + 1)
    assert scaled.fleet.num_waiting == 0
    scaled.run(scaled.now + 100)
    assert scaled.num_expected == 0, "and it ends again"


def test_who_would_rather_be_refused_than_late_hears_so_at_zero() -> None:
    scaled = Scaled(0, 2, down_seconds=30)
    scaled.run(100)
    request_id = scaled.send(ttft=2.0, rather_refused=True)
    assert Refuse(request_id, "unattainable", START_SECONDS) in scaled.actions
    assert any(isinstance(each, Start) for each in scaled.actions), "the next one finds a replica"
    patient = scaled.send(ttft=30.0, rather_refused=True)
    assert owner_of(scaled.fleet, patient) is None
    assert scaled.fleet.num_waiting == 1
    scaled.run(scaled.now + START_SECONDS - 1)
    in_time = scaled.send(ttft=2.0, rather_refused=True)
    assert not scaled.actions, "it is ready in a second"
    scaled.run(scaled.now + 1)
    assert owner_of(scaled.fleet, in_time) == owner_of(scaled.fleet, patient) == "r0"


def test_replicas_that_stay_down_take_a_place_each() -> None:
    scaled = Scaled(1, 2)
    scaled.run(START_SECONDS)
    scaled.starts_fail = True
    for _ in range(2):
        scaled.on(Lost("r0", "killed"))
        scaled.run(scaled.now + START_SECONDS + 2)
    assert scaled.num(ReplicaState.DOWN) == 1
    scaled.run(scaled.now + 300)
    assert scaled.num(ReplicaState.DOWN) == 2, "r1 was tried in its place"
    num_changes = len(scaled.changes)
    scaled.run(scaled.now + 300)
    assert (len(scaled.changes), scaled.num_expected) == (num_changes, 0)
    scaled.starts_fail = False
    scaled.on(ScalingAsked(1, 2))
    scaled.run(scaled.now + 30)
    assert scaled.num(ReplicaState.READY) == 1, "somebody asks for them again"


def test_a_number_that_is_asked_for_holds_until_bounds_are() -> None:
    scaled = Scaled(1, 4)
    scaled.run(START_SECONDS)
    scaled.on(ScaleAsked(3))
    scaled.run(2000)
    assert scaled.num_expected == 3, "though there is nothing to do"
    scaled.on(ScalingAsked(1, 2))
    scaled.run(scaled.now + 2)
    assert (scaled.num_expected, scaled.changes[-1].why) == (2, "bounds")


def test_late_requests_bring_a_replica_and_less_is_planned_from_then_on() -> None:
    scaled = Scaled(1, 4)
    rng = random.Random(1)
    scaled.offer(4, 300, rng)
    assert scaled.num_expected == 1
    scaled.is_late = True
    scaled.offer(4, 200, rng)
    assert scaled.changes[0].why == "late"
    assert scaled.changes[0].late_share > 0.01
    scaled.is_late = False
    num = scaled.num_expected
    scaled.offer(4, 1300, rng)
    assert scaled.num_expected >= 2, "with one it was late"
    assert scaled.num_expected <= num
    scaling = scaled.fleet.scaling
    assert scaling is not None
    assert scaling.planned_share is not None
    assert scaling.planned_share < 0.6


def test_requests_that_no_replica_could_serve_in_time_ask_for_none() -> None:
    scaled = Scaled(1, 4)
    scaled.is_late = True
    for _ in range(300):
        scaled.run(scaled.now + 1)
        scaled.send(num_prompt=1000, ttft=0.05)
    assert scaled.changes == []


def test_freeness_counts_what_the_first_waiting_request_lacks() -> None:
    assert freeness(ReplicaLoad(time=0.0, num_taken=0, num_running=4, num_free_blocks=100)) == 25
    waits = ReplicaLoad(time=0.0, num_taken=0, num_running=4, num_free_blocks=6, num_wanted_blocks=20)
    assert freeness(waits) == -5
    assert freeness(ReplicaLoad(time=0.0, num_taken=0, num_free_blocks=100)) == 100


def test_a_band_of_freeness_adds_and_takes_away_after_ten_seconds_outside() -> None:
    scaled = Scaled(1, 3, policy="freeness")
    scaled.run(START_SECONDS)

    def report(free: int) -> None:
        for replica in ("r0", "r1", "r2"):
            load = ReplicaLoad(time=0.0, num_taken=0, num_running=10, num_free_blocks=free)
            scaled.on(Reported(replica, load))

    report(90)
    scaled.run(START_SECONDS + 9)
    report(200)
    scaled.run(START_SECONDS + 18)
    assert scaled.changes == [], "back in the band before ten seconds were over"
    report(90)
    scaled.run(START_SECONDS + 30)
    assert [(each.num_replicas, each.why) for each in scaled.changes] == [(2, "freeness")]
    scaled.run(START_SECONDS + 49)
    report(700)
    scaled.run(START_SECONDS + 70)
    assert scaled.changes[-1].num_replicas == 1
    assert Stop in {type(each) for each in scaled.fleet.on_event(ScaleAsked(0), scaled.now)}
