"""A fleet: what it does about arrivals, refusals, deaths, drains and changes of its size."""

from __future__ import annotations

from typing import cast

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits, ReplicaLoad
from onbeat.core.slo import SLO
from onbeat.scheduler.cluster.config import FleetRules
from onbeat.scheduler.cluster.events import (
    Aborted,
    Arrived,
    Delivered,
    DrainAsked,
    FleetAction,
    Joined,
    Lost,
    Refuse,
    Refused,
    Reported,
    ScaleAsked,
    Send,
    Start,
    Stop,
    Tick,
    Withdraw,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import ReplicaState
from onbeat.scheduler.cluster.routers import make_router
from onbeat.scheduler.cluster.routing import Router, RoutingRequest


def limits(**changes) -> ReplicaLimits:
    values = {"max_model_len": 4096, "max_num_seqs": 64, "num_blocks": 1000, "block_size": 16, **changes}
    return ReplicaLimits(**values)


def request(request_id: str, *, ttft: float | None = None, arrival: float = 0.0, **changes) -> RoutingRequest:
    slo = None if ttft is None else SLO(ttft=ttft)
    values = {"num_prompt_tokens": 10, "max_tokens": 10, **changes}
    return RoutingRequest(request_id, arrival=arrival, slo=slo, **values)


class Driven:
    """A fleet whose invariants are checked after every event."""

    def __init__(self, num_replicas: int = 2, *, router: str = "least-outstanding", **config) -> None:
        self.fleet = Fleet(make_router(router, 0), FleetRules(**config))
        self.now = 0.0
        self.on(ScaleAsked(num_replicas))
        for number in range(num_replicas):
            self.on(Joined(f"r{number}", limits()))

    def on(self, event, *, after: float = 0.0) -> list[FleetAction]:
        self.now += after
        actions = self.fleet.on_event(event, self.now)
        self.fleet.check_invariants()
        return actions

    def send(self, *request_ids: str, **changes) -> None:
        for request_id in request_ids:
            self.on(Arrived(request(request_id, arrival=self.now, **changes)))

    def state(self, replica: str) -> ReplicaState:
        return next(each.state for each in self.fleet.status().replicas if each.replica == replica)

    def first(self, replica: str, request_id: str, num_tokens: int = 1) -> list[FleetAction]:
        return self.on(Delivered(replica, request_id, num_tokens, 0, is_finished=False))

    def end(self, replica: str, request_id: str) -> list[FleetAction]:
        return self.on(Delivered(replica, request_id, 1, 0, is_finished=True))


def places(actions) -> list[tuple[str, str]]:
    return [(each.request_id, each.replica) for each in actions if isinstance(each, Send)]


def test_a_fleet_starts_what_is_asked_for_and_routes():
    fleet = Fleet(make_router("round-robin", 0))
    assert fleet.on_event(ScaleAsked(2), 0.0) == [Start("r0"), Start("r1")]
    assert fleet.on_event(Arrived(request("a")), 1.0) == []  # it waits for a start
    assert fleet.on_event(Joined("r1", limits()), 2.0) == [Send("r1", "a", "waited")]
    assert fleet.on_event(Joined("r0", limits()), 2.5) == []
    assert fleet.on_event(Arrived(request("b")), 3.0) == [Send("r0", "b", "turn")]
    assert fleet.on_event(Delivered("r0", "b", 5, 0, is_finished=True), 4.0) == []
    assert (fleet.owner("a"), fleet.owner("b")) == ("r1", None)


def test_those_of_a_dead_replica_go_on_elsewhere_by_deadline():
    driven = Driven(3)
    driven.send("late", ttft=9.0)
    driven.send("x", "y")
    driven.send("early", ttft=1.0)  # on r0, too
    driven.first("r0", "late", 4)
    actions = driven.on(Lost("r0", "killed"), after=1.0)
    assert actions == [Start("r0", 0.5), Send("r1", "early", "resumed"), Send("r2", "late", "resumed")]
    assert driven.state("r0") is ReplicaState.STARTING
    assert driven.end("r0", "late") == []  # nothing that it says counts
    assert driven.fleet.owner("late") == "r2"


def test_a_request_under_which_three_replicas_die_in_a_row_is_given_up():
    driven = Driven(4)
    driven.send("a")
    for owner in ("r0", "r1"):
        assert places(driven.on(Lost(owner, "killed")))
    assert driven.on(Lost("r2", "killed"))[-1] == Refuse("a", "too_many_lives")


def test_a_token_forgives_the_deaths_before_it():
    driven = Driven(4)
    driven.send("a")
    for number in range(12):
        owner = driven.fleet.owner("a")
        if number % 2:
            driven.first(owner, "a")
        assert places(driven.on(Lost(owner, "killed"), after=70.0)) == [("a", driven.fleet.owner("a"))]
        driven.on(Joined(owner, limits()))


def test_replicas_that_died_before_they_took_a_request_do_not_count_against_it():
    driven = Driven(6)
    driven.send("a")
    for _ in range(5):  # all were killed in one moment, and each is found dead once the request is sent there
        owner = driven.fleet.owner("a")
        assert places(driven.on(Lost(owner, "killed", num_taken=0)))
    last = driven.fleet.owner("a")
    assert driven.on(Lost(last, "killed", num_taken=0)) == [Start(last, 0.5)]
    assert driven.fleet.status().num_waiting == 1


def test_a_replica_counts_the_requests_that_it_takes_anew_in_each_life():
    driven = Driven(1)
    driven.send("a", "b")
    driven.on(Lost("r0", "killed", num_taken=1))
    driven.on(Joined("r0", limits()), after=70.0)  # a is the first of this life, b the second
    driven.on(Lost("r0", "killed", num_taken=1))
    driven.on(Joined("r0", limits()), after=70.0)
    assert driven.on(Lost("r0", "killed", num_taken=2), after=70.0)[:2] == [
        Start("r0", 0.5),
        Refuse("a", "too_many_lives"),
    ]


def test_who_does_not_resume_is_refused():
    driven = Driven()
    driven.send("a", resumes=False)
    assert Refuse("a", "replica_lost") in driven.on(Lost("r0", "killed"))


def test_with_one_replica_all_wait_for_its_restart():
    driven = Driven(1)
    driven.send("a", "b")
    driven.first("r0", "a")
    assert driven.on(Lost("r0", "killed")) == [Start("r0", 0.5)]
    driven.send("c")
    assert driven.on(Aborted("b")) == []
    assert places(driven.on(Joined("r0", limits()), after=2.0)) == [("a", "r0"), ("c", "r0")]


def test_few_new_requests_wait_for_a_start():
    driven = Driven(1, max_num_waiting=1)
    driven.on(Lost("r0", "killed"))
    driven.on(Joined("r0", limits()), after=3.0)
    driven.on(Lost("r0", "killed"))
    driven.send("a")
    assert driven.on(Arrived(request("b"))) == [Refuse("b", "no_replica", 3.0)]


def started_in(seconds: float, **config) -> Driven:
    """Return a fleet of one replica, whose start took so long, once that has died."""
    fleet = Driven(0, **config)
    fleet.on(ScaleAsked(1))
    fleet.on(Joined("r0", limits()), after=seconds)
    return fleet


def test_a_new_request_waits_for_a_start_no_longer_than_may_be():
    driven = started_in(20.0, max_wait_seconds=60.0)
    driven.send("stream", "queued")
    driven.first("r0", "stream")
    driven.on(Lost("r0", "killed"), after=100.0)  # now both wait, "queued" from now on
    driven.send("new")
    assert driven.fleet.next_duty == driven.now + 60.0
    assert driven.on(Tick(), after=59.0) == []
    refused = driven.on(Tick(), after=1.0)
    assert refused == [Refuse("queued", "no_replica", 40.0), Refuse("new", "no_replica", 40.0)]
    assert driven.on(Arrived(request("newer"))) == []
    late = driven.on(Tick(), after=21.0)  # the start is 61 s late, and expected to be as late again
    assert late == []
    assert driven.on(Arrived(request("newest"))) == [Refuse("newest", "no_replica", 61.0)]
    assert sorted(places(driven.on(Joined("r0", limits())))) == [("newer", "r0"), ("stream", "r0")]


def test_a_new_request_is_told_at_once_where_a_start_takes_longer_than_it_may_wait():
    driven = started_in(200.0, max_wait_seconds=60.0)
    driven.on(Lost("r0", "killed"))
    assert driven.on(Arrived(request("a", arrival=driven.now))) == [Refuse("a", "no_replica", 200.0)]
    driven.now += 150.0
    assert driven.on(Arrived(request("b", arrival=driven.now))) == []  # it is expected in 50 s
    assert places(driven.on(Joined("r0", limits()), after=40.0)) == [("b", "r0")]
    unbounded = started_in(200.0)
    unbounded.on(Lost("r0", "killed"))
    assert unbounded.on(Arrived(request("a", arrival=unbounded.now))) == []


def test_a_replica_restarts_later_each_time_and_stays_down_after_three_deaths():
    driven = Driven(1)
    assert driven.on(Lost("r0", "killed")) == [Start("r0", 0.5)]
    assert driven.on(Lost("r0", "cannot start"), after=1.0) == [Start("r0", 1.0)]
    driven.send("a")
    assert driven.on(Lost("r0", "cannot start"), after=1.0) == [Refuse("a", "no_replica")]
    assert driven.state("r0") is ReplicaState.DOWN
    assert driven.fleet.status().replicas[0].why == "cannot start"
    assert driven.on(Arrived(request("b"))) == [Refuse("b", "no_replica")]
    assert driven.on(ScaleAsked(1)) == [Start("r0", 0.0)]  # somebody asks for it again
    driven.on(Joined("r0", limits()))
    assert driven.on(Lost("r0", "killed"), after=1.0) == [Start("r0", 0.5)]


def test_deaths_far_apart_are_forgiven_but_not_at_once():
    driven = Driven(1)
    delays = []
    for pause in (0.0, 40.0, 40.0, 40.0, 100.0):  # it lives no minute but the last time
        [start] = driven.on(Lost("r0", "killed"), after=pause)
        delays.append(start.delay)
        driven.on(Joined("r0", limits()))
    assert delays == [0.5, 1.0, 2.0, 4.0, 0.5]
    driven = Driven(1)
    for _ in range(9):
        [start] = driven.on(Lost("r0", "cannot start"), after=35.0)
    assert start.delay == 30.0


def test_a_refusal_is_tried_once_elsewhere():
    driven = Driven(3)
    driven.send("a")
    assert driven.on(Refused("r0", "a", is_for_load=True, retry_after=4.0)) == [Send("r1", "a", "retried")]
    again = driven.on(Refused("r1", "a", is_for_load=True, retry_after=7.0))
    assert again == [Refuse("a", "overloaded", 4.0)]
    driven.send("b")
    assert driven.on(Refused("r2", "b", is_for_load=False)) == [Refuse("b", "invalid")]


def test_with_one_replica_a_refusal_is_final():
    driven = Driven(1)
    driven.send("a")
    assert driven.on(Refused("r0", "a", is_for_load=True)) == [Refuse("a", "overloaded")]


def test_a_stream_is_never_refused_for_load():
    driven = Driven(3)
    driven.send("a")
    driven.first("r0", "a")
    driven.on(Lost("r0", "killed"))
    assert driven.on(Refused("r1", "a", is_for_load=True)) == [Send("r2", "a", "retried")]
    assert driven.on(Refused("r2", "a", is_for_load=True, retry_after=2.0)) == []
    assert driven.fleet.next_time == driven.now + 2.0
    assert driven.on(Tick(), after=1.0) == []
    assert places(driven.on(Tick(), after=1.0)) == [("a", "r1")]


def test_a_refused_stream_that_waits_is_told_when_nobody_is_left():
    driven = Driven(2, restarts=False)
    driven.send("a")
    driven.first("r0", "a")
    driven.on(Lost("r0", "killed"))
    driven.on(Refused("r1", "a", is_for_load=True, retry_after=2.0))
    assert driven.on(Lost("r1", "killed")) == [Refuse("a", "no_replica")]


def test_who_waits_on_a_draining_replica_moves_and_who_runs_finishes():
    driven = Driven()
    driven.send("a", "b", "c", "d")
    driven.first("r0", "a")
    actions = driven.on(DrainAsked("r0", 10.0))
    assert actions == [Withdraw("r0", "c"), Send("r1", "c", "moved")]
    assert driven.on(Arrived(request("e"))) == [Send("r1", "e", "load")]
    assert driven.end("r0", "a") == [Stop("r0")]
    assert driven.state("r0") is ReplicaState.STOPPED
    assert driven.on(Lost("r0", "ended")) == []
    assert driven.on(Joined("r0", limits())) == [Stop("r0")]  # nobody asked for it


def test_what_outlasts_a_drain_goes_on_elsewhere():
    driven = Driven()
    driven.send("a")
    driven.first("r0", "a")
    driven.on(DrainAsked("r0", 10.0, restarts=True))
    assert driven.fleet.next_time == 10.0
    assert driven.on(Tick(), after=9.0) == []
    actions = driven.on(Tick(), after=1.0)
    assert actions == [Withdraw("r0", "a"), Send("r1", "a", "moved"), Stop("r0"), Start("r0")]
    driven.on(Joined("r0", limits()))
    assert driven.state("r0") is ReplicaState.READY


def test_the_last_replica_serves_what_it_has_while_it_drains():
    driven = Driven(1)
    driven.send("a", "b")
    driven.first("r0", "a")
    assert driven.on(DrainAsked("r0", 10.0, restarts=True)) == []
    driven.now = 5.0
    driven.send("c")  # it waits
    assert driven.on(Tick(), after=5.0) == [Withdraw("r0", "a"), Withdraw("r0", "b"), Stop("r0"), Start("r0")]
    assert places(driven.on(Joined("r0", limits()))) == [("a", "r0"), ("b", "r0"), ("c", "r0")]
    driven.on(DrainAsked("r0", 10.0))
    assert driven.on(Arrived(request("d"))) == [Refuse("d", "no_replica")]


def test_who_waits_for_a_restart_is_told_when_it_is_called_off():
    driven = Driven(1)
    driven.send("a")
    driven.first("r0", "a")
    driven.on(DrainAsked("r0", 10.0, restarts=True))
    driven.send("b")
    assert driven.on(DrainAsked("r0", 10.0)) == [Refuse("b", "no_replica")]


def test_a_draining_replica_that_dies_is_not_started_again_unless_it_was_to_be():
    driven = Driven()
    driven.send("a", "b")
    driven.first("r0", "a")
    driven.on(DrainAsked("r0", 10.0))
    assert driven.on(Lost("r0", "killed")) == [Send("r1", "a", "resumed")]
    driven.first("r1", "b")
    driven.on(ScaleAsked(2))
    driven.on(Joined("r0", limits()))
    driven.on(DrainAsked("r1", 10.0, restarts=True))
    assert driven.on(Lost("r1", "killed"))[0] == Start("r1")


def test_scaling_starts_and_drains():
    driven = Driven(1)
    assert driven.on(ScaleAsked(3)) == [Start("r1"), Start("r2")]
    driven.on(Joined("r1", limits()))
    driven.send("a", "b", "c")  # a and c on r0
    for replica, request_id in (("r0", "a"), ("r1", "b"), ("r0", "c")):
        driven.first(replica, request_id)
    assert driven.on(ScaleAsked(2)) == [Stop("r2")]  # the one that has not even started
    assert driven.on(ScaleAsked(1)) == []
    assert driven.state("r1") is ReplicaState.DRAINING
    assert driven.on(ScaleAsked(2)) == [Start("r2")]
    assert driven.end("r1", "b") == [Stop("r1")]
    with pytest.raises(ConfigError, match="cannot have -1 replicas"):
        driven.on(ScaleAsked(-1))


def test_a_request_goes_only_where_it_fits():
    driven = Driven(1)
    driven.on(Joined("long", limits(max_model_len=32768)))
    for number in range(3):
        [sent] = driven.on(Arrived(request(f"{number}", num_prompt_tokens=4000, max_tokens=500)))
        assert sent.replica == "long"
    [sent] = driven.on(Arrived(request("longest", num_prompt_tokens=32000, max_tokens=5000)))
    assert sent.replica == "long"  # it ends when the context is full
    too_long = request("too long", num_prompt_tokens=32768, max_tokens=1)
    assert driven.on(Arrived(too_long)) == [Refuse("too long", "too_long")]
    assert places(driven.on(Lost("long", "killed"))) == []  # they fit nowhere else, and wait for it
    assert driven.fleet.status().num_waiting == 4


def test_a_replica_that_comes_back_unseen_has_lost_what_it_had():
    driven = Driven()
    driven.send("a")
    driven.first("r0", "a")
    assert places(driven.on(Joined("r0", limits()))) == [("a", "r1")]


def test_an_abort_withdraws():
    driven = Driven()
    driven.send("a")
    assert driven.on(Aborted("a")) == [Withdraw("r0", "a")]
    assert driven.on(Aborted("a")) == []
    assert driven.end("r0", "a") == []


def test_decisions_are_told():
    told = []
    fleet = Fleet(
        make_router("round-robin", 0),
        on_decision=lambda event, now, actions: told.append((event, now, actions)),
    )
    actions = fleet.on_event(ScaleAsked(1), 3.0)
    assert told == [(ScaleAsked(1), 3.0, actions)]


class Mute:
    """A router that must not be asked, and hears of members and reports alone."""

    reads_reports = True

    def join(self, replica: int, limits: ReplicaLimits | None = None) -> None: ...

    def leave(self, replica: int) -> None: ...

    def on_report(self, replica: int, load: ReplicaLoad, now: float) -> None: ...


def test_no_router_is_asked_where_there_is_one_replica():
    driven = Driven(1)
    driven.fleet = Fleet(cast(Router, Mute()))
    driven.on(ScaleAsked(1))
    driven.on(Joined("r0", limits()))
    assert driven.on(Arrived(request("a"))) == [Send("r0", "a", "only")]
    driven.on(Reported("r0", ReplicaLoad(time=0.0, num_taken=1)))
    driven.first("r0", "a")
    driven.end("r0", "a")
    driven.send("b", "c")
    driven.on(Aborted("b"))
    assert driven.on(Lost("r0", "killed"))[0] == Start("r0", 0.5)
    assert places(driven.on(Joined("r0", limits()))) == [("c", "r0")]


@pytest.mark.parametrize("router", ["least-outstanding", "prefix-affinity"])
def test_once_there_is_a_choice_the_router_knows_what_the_first_replica_has(router):
    driven = Driven(1, router=router)
    driven.send("a", "b")
    driven.first("r0", "a")
    assert driven.on(ScaleAsked(2)) == [Start("r1")]
    driven.on(Joined("r1", limits()))
    actions = [each for name in "cd" for each in driven.on(Arrived(request(name)))]
    assert places(actions) == [("c", "r1"), ("d", "r1")]
    for name in "ab":
        driven.end("r0", name)
    assert places(driven.on(Arrived(request("e")))) == [("e", "r0")]


def test_a_router_that_was_not_asked_counts_what_comes_after_the_report():
    """Three requests were sent without it: the fourth is not among those that a report of three counts."""
    driven = Driven(1, router="slo")
    driven.send("a", "b", "c")
    load = ReplicaLoad(time=0.0, num_taken=3, num_running=3)
    driven.on(Reported("r0", load))
    driven.on(ScaleAsked(2))
    driven.on(Joined("r1", limits()))
    driven.on(Reported("r0", load))
    driven.on(Reported("r1", ReplicaLoad(time=0.0, num_taken=0)))
    actions = [each for name in "defg" for each in driven.on(Arrived(request(name)))]
    assert [replica for _, replica in places(actions)] == ["r1", "r1", "r1", "r0"]
    driven.on(Reported("r0", load))
    assert places(driven.on(Arrived(request("h")))) == [("h", "r1")]
