"""A fleet: what it does about arrivals, refusals, deaths, drains and changes of its size."""

from __future__ import annotations

from onbeat.scheduler.cluster.events import (
    Aborted,
    Arrived,
    Delivered,
    Joined,
    Lost,
    Refuse,
    Refused,
    ScaleAsked,
    Send,
    Start,
    Tick,
)
from onbeat.scheduler.cluster.fleet import Fleet
from onbeat.scheduler.cluster.membership import MOST_DEATHS, ReplicaState
from onbeat.scheduler.cluster.routers import make_router
from tests.owners import owner_of
from tests.pure.scheduler.driven import Driven, limits, places, request


def test_a_fleet_starts_what_is_asked_for_and_routes():
    fleet = Fleet(make_router("round-robin"))
    assert fleet.on_event(ScaleAsked(2), 0.0) == [Start("r0"), Start("r1")]
    assert fleet.on_event(Arrived(request("a")), 1.0) == []  # it waits for a start
    assert fleet.on_event(Joined("r1", limits()), 2.0) == [Send("r1", "a", "waited")]
    assert fleet.on_event(Joined("r0", limits()), 2.5) == []
    assert fleet.on_event(Arrived(request("b")), 3.0) == [Send("r0", "b", "turn")]
    assert fleet.on_event(Delivered("r0", "b", 5, 0, is_finished=True), 4.0) == []
    assert (owner_of(fleet, "a"), owner_of(fleet, "b")) == ("r1", None)


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
    assert owner_of(driven.fleet, "late") == "r2"


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
        owner = owner_of(driven.fleet, "a")
        if number % 2:
            driven.first(owner, "a")
        assert places(driven.on(Lost(owner, "killed"), after=70.0)) == [("a", owner_of(driven.fleet, "a"))]
        driven.on(Joined(owner, limits()))


def test_replicas_that_died_before_they_took_a_request_do_not_count_against_it():
    driven = Driven(6)
    driven.send("a")
    for _ in range(5):  # all were killed in one moment, and each is found dead once the request is sent there
        owner = owner_of(driven.fleet, "a")
        assert places(driven.on(Lost(owner, "killed", num_taken=0)))
    last = owner_of(driven.fleet, "a")
    assert driven.on(Lost(last, "killed", num_taken=0)) == [Start(last, 0.5)]
    assert driven.fleet.num_waiting == 1


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


def test_few_new_requests_wait_for_a_start(monkeypatch):
    monkeypatch.setattr("onbeat.scheduler.cluster.fleet.MOST_WAITING", 1)
    driven = Driven(1)
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
    assert driven.fleet.replicas()[0].why == "cannot start"
    assert driven.on(Arrived(request("b"))) == [Refuse("b", "no_replica")]
    assert driven.on(ScaleAsked(1)) == [Start("r0", 0.0)]  # somebody asks for it again
    driven.on(Joined("r0", limits()))
    assert driven.on(Lost("r0", "killed"), after=1.0) == [Start("r0", 0.5)]


def test_deaths_are_forgotten_after_a_minute():
    driven = Driven(1)
    delays = []
    for pause in (0.0, 40.0, 40.0, 100.0):
        [start] = driven.on(Lost("r0", "killed"), after=pause)
        delays.append(start.delay)
        driven.on(Joined("r0", limits()))
    assert delays == [0.5, 1.0, 1.0, 0.5]


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
    driven = Driven(2)
    driven.send("a")
    driven.first("r0", "a")
    for _ in range(MOST_DEATHS):
        driven.on(Lost("r0", "killed"))
    driven.on(Refused("r1", "a", is_for_load=True, retry_after=2.0))
    told = [driven.on(Lost("r1", "killed")) for _ in range(MOST_DEATHS)]
    assert told[-1] == [Refuse("a", "no_replica")]
