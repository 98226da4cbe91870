"""Requests that stand still, or are asked for, before or after they have left their batch."""

from __future__ import annotations

import pytest

from onbeat.core.handover import DetachAnswer
from onbeat.scheduler.replica.departures import Departures

LEFT = DetachAnswer("a", None)
"""What became of it does not matter here."""


@pytest.fixture
def departures() -> Departures[DetachAnswer]:
    return Departures()


def stopped(departures: Departures[DetachAnswer]) -> None:
    """Let a request stand still; it leaves with the step under way."""
    departures.stop_after_first("a")
    assert departures.is_any_to_stop
    assert departures.on_first_token("a", is_finished=False)
    assert not departures.is_any_to_stop


def test_a_request_that_runs_is_taken_out_for_a_move(departures):
    assert departures.ask("a", "m1")
    assert departures.take_gone() == []
    departures.on_left(LEFT)
    assert departures.take_gone() == [("m1", LEFT)]
    assert departures.take_gone() == []


def test_one_that_stands_still_is_there_at_once(departures):
    stopped(departures)
    departures.on_left(LEFT)
    assert departures.take_gone() == []
    assert not departures.ask("a", "m1")
    assert departures.take_gone() == [("m1", LEFT)]


def test_one_that_has_yet_to_leave_is_told_to_once(departures):
    stopped(departures)
    assert not departures.ask("a", "m1")
    assert departures.take_gone() == []
    departures.on_left(LEFT)
    assert departures.take_gone() == [("m1", LEFT)]


@pytest.mark.parametrize("has_left", [False, True])
def test_one_that_is_to_go_on_is_put_back_once_it_has_left(departures, has_left):
    """One that has left is put back by whoever says that it is to go on."""
    stopped(departures)
    if has_left:
        departures.on_left(LEFT)
    departures.go_on("a")
    assert departures.take_to_put_back() == []
    if not has_left:
        departures.on_left(LEFT)
        assert departures.take_to_put_back() == ["a"]
    assert departures.take_gone() == departures.take_to_put_back() == []
    assert departures.ask("a", "m1"), "it runs"


@pytest.mark.parametrize("verb", ["go_on", "forget"])
def test_a_move_that_waits_for_one_is_answered_whatever_else_is_said_before_it_has_left(departures, verb):
    stopped(departures)
    assert not departures.ask("a", "m1")
    getattr(departures, verb)("a")
    departures.on_left(LEFT)
    assert departures.take_gone() == [("m1", LEFT)]
    assert departures.take_to_put_back() == []
    assert departures.ask("a", "m2"), "nothing is left of it"


def test_one_that_ends_with_its_first_token_does_not_stand_still(departures):
    departures.stop_after_first("a")
    assert not departures.on_first_token("b", is_finished=False)
    assert not departures.on_first_token("a", is_finished=True)
    assert not departures.on_first_token("a", is_finished=False)


def test_who_waits_for_one_that_is_gone_is_answered(departures):
    assert departures.ask("a", "m1")
    departures.forget("a")
    departures.on_left(LEFT)
    assert departures.take_gone() == [("m1", LEFT)]


def test_one_that_is_gone_before_its_first_token_stops_nobody(departures):
    departures.stop_after_first("a")
    departures.forget("a")
    assert not departures.is_any_to_stop
