"""Replicas that drain, are scaled and come back; and when a fleet asks its router."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLoad
from onbeat.scheduler.cluster.events import (
    Aborted,
    Arrived,
    DrainAsked,
    Joined,
    Lost,
    Refuse,
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
from tests.pure.scheduler.driven import Driven, limits, places, request


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


def test_what_is_not_to_be_resumed_ends_with_a_drain():
    driven = Driven()
    driven.send("a", "b", "c", resumes=False)
    driven.first("r0", "a")
    moved = driven.on(DrainAsked("r0", 10.0))  # of c, no token would be computed twice
    assert moved == [Withdraw("r0", "c"), Send("r1", "c", "moved")]
    assert driven.on(Tick(), after=10.0) == [Withdraw("r0", "a"), Refuse("a", "replica_lost"), Stop("r0")]


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
    with pytest.raises(ConfigError, match="-1 replicas"):
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
    [sent] = driven.on(Arrived(request("embedded", num_prompt_tokens=32768, max_tokens=0)))
    assert sent.replica == "long"  # it needs no place for an answer
    assert driven.end("long", "embedded") == []
    longer = request("longer", num_prompt_tokens=32769, max_tokens=0)
    assert driven.on(Arrived(longer)) == [Refuse("longer", "too_long")]
    assert places(driven.on(Lost("long", "killed"))) == []  # they fit nowhere else, and wait for it
    assert driven.fleet.num_waiting == 4


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
        make_router("round-robin"),
        on_decision=lambda event, now, actions: told.append((event, now, actions)),
    )
    actions = fleet.on_event(ScaleAsked(1), 3.0)
    assert told == [(ScaleAsked(1), 3.0, actions)]


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
