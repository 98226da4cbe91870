"""A fleet that changes its own size: by the work that arrives, what is late, and how much memory is free."""

from __future__ import annotations

import random
from heapq import heappop, heappush
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PrefillCosts, ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.comparators.virtual_usage import freeness
from onbeat.scheduler.cluster.events import (
    Arrived,
    Delivered,
    FleetAction,
    Joined,
    Lost,
    Refuse,
    Reported,
    Rescale,
    ScaleAsked,
    ScalingAsked,
    Send,
    Start,
    Stop,
    Tick,
)
from onbeat.scheduler.cluster.fleet import Fleet, FleetConfig
from onbeat.scheduler.cluster.membership import ReplicaState
from onbeat.scheduler.cluster.offered_work import Offered, OfferedWork
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.routing import RoutingRequest
from onbeat.scheduler.cluster.scaling import ScaleBounds, parse_bounds, parse_policy
from tests.examples import examples

LIMITS = ReplicaLimits(max_model_len=8192, max_num_seqs=64, num_blocks=4000, block_size=16)
COSTS = PrefillCosts(token=1e-4, pair=0.0, step=2e-3, decode=1e-4, decode_base=5e-3)
"""A prompt of 1,000 tokens takes 0.1 s."""
START_SECONDS = 20.0


class Scaled:
    """A fleet whose replicas start in `START_SECONDS` and answer each request 0.5 s after it came."""

    def __init__(
        self, least: int, most: int, *, policy: str = "objective", down_seconds: float = 600.0
    ) -> None:
        config = FleetConfig(autoscale=policy, scale_down_seconds=down_seconds)
        self.fleet = Fleet(make_router("least-outstanding", 0), config)
        self.now = 0.0
        self.changes: list[Rescale] = []
        self.actions: list[FleetAction] = []
        self._due: list[tuple[float, int, object]] = []
        self._num = 0
        self.is_late = False
        """Whether answers take 5 s."""
        self.starts_fail = False
        self.on(ScaleAsked(max(1, least)))
        self.on(ScalingAsked(least, most))

    def on(self, event) -> None:
        self.actions = self.fleet.on_event(event, self.now)
        self.fleet.check_invariants()
        for action in self.actions:
            if isinstance(action, Rescale):
                self.changes.append(action)
            elif isinstance(action, Start):
                result = (
                    Lost(action.replica, "no luck") if self.starts_fail else Joined(action.replica, LIMITS)
                )
                self._later(action.delay + START_SECONDS, result)
            elif isinstance(action, Send):
                ended = Delivered(action.replica, action.request_id, 10, 0, is_finished=True)
                self._later(5.0 if self.is_late else 0.5, ended)

    def _later(self, seconds: float, event: object) -> None:
        self._num += 1
        heappush(self._due, (self.now + seconds, self._num, event))

    def run(self, until: float) -> None:
        """Let time pass, with a look each time that one is wanted."""
        while min(next_due := self._due[0][0] if self._due else inf, self.fleet.next_time) <= until:
            if next_due <= self.fleet.next_time:
                self.now, _, event = heappop(self._due)
                self.on(event)
                if isinstance(event, Joined):
                    self.on(Reported(event.replica, ReplicaLoad(time=0.0, num_taken=0, costs=COSTS)))
            else:
                self.now = max(self.now, self.fleet.next_time)
                self.on(Tick())
        self.now = until

    def send(self, *, num_prompt: int = 1000, ttft: float | None = 2.0, **fields) -> str:
        self._num += 1
        request = RoutingRequest(
            f"q{self._num}",
            num_prompt_tokens=num_prompt,
            max_tokens=10,
            arrival=self.now,
            slo=None if ttft is None else SLO(ttft=ttft, tbt=0.1),
            **fields,
        )
        self.on(Arrived(request))
        return request.request_id

    def offer(self, rate: float, seconds: float, rng: random.Random) -> None:
        """Send Poisson arrivals of exponential prompts of 1,000 tokens in the mean."""
        end = self.now + seconds
        while (when := self.now + rng.expovariate(rate)) < end:
            self.run(when)
            self.send(num_prompt=1 + min(8000, int(rng.expovariate(1e-3))))
        self.run(end)

    def num(self, *states: ReplicaState) -> int:
        return sum(self.fleet.status().count(state) for state in states)

    @property
    def num_expected(self) -> int:
        return self.num(ReplicaState.READY, ReplicaState.STARTING)


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
    scaling = scaled.fleet.status().scaling
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
    assert scaled.fleet.status().num_waiting == 1
    scaled.send()
    assert scaled.actions == [], "it is started once"
    scaled.run(scaled.now + START_SECONDS + 1)
    assert scaled.fleet.status().num_waiting == 0
    scaled.run(scaled.now + 100)
    assert scaled.num_expected == 0, "and it ends again"


def test_who_would_rather_be_refused_than_late_hears_so_at_zero() -> None:
    scaled = Scaled(0, 2, down_seconds=30)
    scaled.run(100)
    request_id = scaled.send(ttft=2.0, rather_refused=True)
    assert Refuse(request_id, "unattainable", START_SECONDS) in scaled.actions
    assert any(isinstance(each, Start) for each in scaled.actions), "the next one finds a replica"
    patient = scaled.send(ttft=30.0, rather_refused=True)
    assert scaled.fleet.owner(patient) is None
    assert scaled.fleet.status().num_waiting == 1
    scaled.run(scaled.now + START_SECONDS - 1)
    in_time = scaled.send(ttft=2.0, rather_refused=True)
    assert not scaled.actions, "it is ready in a second"
    scaled.run(scaled.now + 1)
    assert scaled.fleet.owner(in_time) == scaled.fleet.owner(patient) == "r0"


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
    scaling = scaled.fleet.status().scaling
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


@pytest.mark.parametrize("text", ["", "work", "objective:3", "freeness:", "freeness:60..10", "freeness:a..b"])
def test_policies_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="objective, freeness"):
        parse_policy(text)


def test_a_fleet_that_is_not_made_for_it_does_not_scale_itself() -> None:
    with pytest.raises(ConfigError, match="--autoscale"):
        Fleet(make_router("slo", 0)).on_event(ScalingAsked(1, 2), 0.0)
    with pytest.raises(ConfigError, match="--disaggregate"):
        FleetConfig(autoscale="objective", num_prefill=1)


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
