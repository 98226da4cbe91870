"""What objectives ask for, and which bounds and policies can be written."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.events import (
    Arrived,
    RoutingRequest,
    ScalingAsked,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.scaling import ScaleBounds, make_policy, parse_bounds
from onbeat.scheduler.cluster.scaling_policy import Offered, OfferedWork
from tests.examples import examples
from tests.pure.scheduler.scaled import COSTS, LIMITS, START_SECONDS, Scaled


@pytest.mark.parametrize(
    ("text", "says"),
    [("4", "such as 1..4"), ("4..1", "between 4 and 1"), ("0..0", "between 0 and 0"), ("a..b", "a..b")],
)
def test_bounds_that_are_none_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_bounds(text)


def test_bounds_are_read() -> None:
    assert parse_bounds(" 0..4") == ScaleBounds(0, 4)
    assert str(ScaleBounds(1, 2)) == "1..2"


@pytest.mark.parametrize("text", ["", "work", "objective:3"])
def test_policies_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"'{text}'"):
        make_policy(text)


def test_a_fleet_that_is_not_made_for_it_does_not_scale_itself() -> None:
    with pytest.raises(ConfigError, match="--autoscale"):
        Fleet(make_router("slo")).on_event(ScalingAsked(1, 2), 0.0)


def offered(objectives, *, rate: float = 4.0, seconds: int = 60) -> tuple[OfferedWork, Offered]:
    """Return the load of a minute, its requests with these objectives in turn."""
    work = OfferedWork()
    work.costs, work.limits = COSTS, LIMITS
    for num in range(int(rate * seconds)):
        slo = objectives[num % len(objectives)]
        work.on_arrival(RoutingRequest(f"q{num}", num_prompt_tokens=1000, slo=slo), num / rate)
    return work, work.of_last(seconds, seconds)


TBT = st.one_of(st.none(), st.floats(0.001, 0.5))


@examples(200)
@given(
    objectives=st.lists(
        st.builds(lambda ttft, tbt: SLO(ttft=ttft, tbt=tbt) if ttft or tbt else None, TBT, TBT),
        min_size=1,
        max_size=20,
    ),
    rate=st.sampled_from([0.5, 4.0, 20.0, 60.0]),
)
def test_objectives_ask_for_replicas_only_as_far_as_these_help(objectives, rate: float) -> None:
    work, load = offered(objectives, rate=rate)
    _, free = offered([None], rate=rate)
    planned, most = 0.85, 64
    num, num_free = work.needed(load, planned, most), work.needed(free, planned, most)
    least_step = COSTS.decode_base
    assert load.tbt > least_step, "an objective shorter than any step decides nothing"
    if all(each is None or each.tbt is None or each.tbt <= 0.99 * least_step for each in objectives):
        assert num == num_free
    # Beyond what the work alone needs, each one has to lower what the objective makes of it.
    for fewer in range(num_free, num):
        assert work.share(load, fewer) > planned
        assert work.share(load, fewer + 1) < work.share(load, fewer)
    assert work.share(load, 10**9) < 0.01, "what no number lowers is no share"


def test_few_requests_do_not_decide_for_all() -> None:
    tight, usual = SLO(tbt=0.0055), SLO(tbt=0.1)
    work, load = offered([tight] + [usual] * 239)
    _, without = offered([usual])
    assert work.needed(load, 0.85, 64) == work.needed(without, 0.85, 64)
    _, many = offered([tight] + [usual] * 19, rate=20.0)
    assert many.tbt == pytest.approx(0.0055, rel=0.02)


@pytest.mark.parametrize("shape", ["ttft", "tbt", "refused"])
def test_an_objective_that_nobody_can_keep_starts_no_replica(shape: str) -> None:
    scaled = Scaled(1, 8)
    scaled.run(START_SECONDS)
    for num in range(600):
        scaled.run(scaled.now + 0.25)
        if num % 20 and shape != "refused":
            scaled.send(num_prompt=500)
        elif shape == "tbt":
            scaled.on(Arrived(RoutingRequest(f"t{num}", num_prompt_tokens=500, slo=SLO(tbt=0.004))))
        else:
            scaled.send(num_prompt=6000, ttft=0.001, rather_refused=shape == "refused")
    assert scaled.changes == []


def test_the_more_are_late_the_more_come_and_they_stay_as_long_as_others() -> None:
    scaled = Scaled(1, 8)
    scaled.run(START_SECONDS)
    scaled.is_late = True
    scaled.offer(3, 400, random.Random(2))
    assert [each.num_replicas for each in scaled.changes] == [2, 4, 8]
    assert {each.why for each in scaled.changes} == {"late"}
    scaled.is_late = False
    scaled.offer(3, 400, random.Random(2))
    assert scaled.num_expected == 8, "what lateness asked for counts for ten minutes"
