"""One move, stage by stage, and what becomes of the request where something goes wrong."""

from __future__ import annotations

from math import inf

import pytest

from benchmarks.policies.distserve import WAITS_FOR_CAPACITY
from benchmarks.policies.splitwise import COPIED_AHEAD
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import Answered, MoveStep
from onbeat.scheduler.cluster.moves import ANSWER_SECONDS, RUNS, STILL_SECONDS, Course, Move, MoveEnd, Moves

RESERVE, HOLD, PULL, FREEZE, ADOPT = (
    MoveVerb.RESERVE,
    MoveVerb.HOLD,
    MoveVerb.PULL,
    MoveVerb.FREEZE,
    MoveVerb.ADOPT,
)
TAKE, REATTACH, UNHOLD, RELEASE = (
    MoveVerb.TAKE,
    MoveVerb.REATTACH,
    MoveVerb.UNHOLD,
    MoveVerb.RELEASE,
)


class OneMove:
    """A move of `q` from `s` to `d`."""

    def __init__(self, num_blocks: int = 30, *, course: Course = RUNS) -> None:
        self.steps: list[MoveStep] = []
        self.outcomes: list[MoveEnd] = []
        self.now = 0.0
        self.waiting: list[Move] = []
        self.moves = Moves(
            self.take, lambda _, outcome: self.outcomes.append(outcome), on_no_capacity=self.waiting.append
        )
        self.moves.begin(
            "q",
            "s",
            "d",
            num_blocks=num_blocks,
            why="test",
            now=0.0,
            course=course,
        )

    def take(self, action: object) -> None:
        assert isinstance(action, MoveStep)
        self.steps.append(action)

    def answer(self, *, ok: bool = True, num_blocks: int = 0) -> None:
        step = self.steps[-1]
        self.moves.on_answer(Answered(step.replica, step.move, step.verb, ok, num_blocks), self.now)

    def asked(self) -> list[tuple[str, MoveVerb]]:
        """Return what has been asked for since the last call."""
        steps = [(step.replica, step.verb) for step in self.steps]
        self.steps = self.steps[-1:]
        return steps[1:] if len(steps) > 1 else steps

    def advance(self, verb: MoveVerb) -> None:
        """Go on until a step has been asked for."""
        while self.steps[-1].verb is not verb:
            self.answer(num_blocks=32 if FREEZE in [step.verb for step in self.steps] else 30)


def test_a_move_that_goes_well() -> None:
    move = OneMove()
    for num_blocks in (0, 30, 0, 31, 32, 0, 0):
        move.answer(num_blocks=num_blocks)
    assert [(step.replica, step.verb, step.num_blocks) for step in move.steps] == [
        ("d", RESERVE, 34),
        ("s", HOLD, 0),
        ("d", PULL, 0),
        ("s", HOLD, 0),
        ("s", FREEZE, 0),
        ("d", PULL, 30),
        ("d", ADOPT, 0),
        ("d", TAKE, 0),
    ]
    assert move.outcomes == [MoveEnd.MOVED]
    assert move.moves.next_time == inf


def test_a_request_that_outgrows_its_room_gets_more_before_it_is_copied() -> None:
    move = OneMove(num_blocks=2)
    move.answer()
    move.answer(num_blocks=12)
    assert (move.steps[-1].verb, move.steps[-1].num_blocks) == (RESERVE, 17)
    move.answer()
    assert (move.steps[-1].verb, move.steps[-1].num_blocks) == (PULL, 0)


def test_a_request_that_outruns_its_copies_is_stopped_after_three() -> None:
    move = OneMove(num_blocks=200)
    move.answer()
    for num_blocks in (50, 100, 150, 200):
        move.answer(num_blocks=num_blocks)
        if move.steps[-1].verb is PULL:
            move.answer()
    assert [step.verb for step in move.steps].count(PULL) == 3
    assert move.steps[-1].verb is FREEZE


def test_little_is_copied_while_the_request_stands_still_alone() -> None:
    move = OneMove(num_blocks=3)
    move.answer()
    move.answer(num_blocks=3)
    assert move.steps[-1].verb is FREEZE


@pytest.mark.parametrize(
    ("verb", "then"),
    [
        (RESERVE, [("d", RELEASE), ("s", UNHOLD)]),
        (HOLD, [("d", RELEASE), ("s", UNHOLD)]),
        (FREEZE, [("d", RELEASE), ("s", UNHOLD)]),
        (ADOPT, [("d", RELEASE), ("s", REATTACH)]),
    ],
)
def test_a_refusal_leaves_the_request_at_its_source(verb, then) -> None:
    move = OneMove()
    move.advance(verb)
    move.asked()
    move.answer(ok=False)
    assert move.asked() == then
    assert len(move.outcomes) == 1
    assert move.outcomes != [MoveEnd.MOVED]
    assert not move.moves.is_under_way("q")


@pytest.mark.parametrize(
    ("verb", "then"),
    [
        (HOLD, [("d", RELEASE), ("s", UNHOLD)]),
        (FREEZE, [("d", RELEASE)]),
        (ADOPT, [("d", RELEASE), ("s", REATTACH)]),
    ],
)
def test_the_death_of_the_destination(verb, then) -> None:
    move = OneMove()
    move.advance(verb)
    move.asked()
    move.moves.on_lost("d")
    assert move.asked() == then
    assert move.outcomes == [MoveEnd.CANCELLED]


@pytest.mark.parametrize(("ok", "then"), [(True, REATTACH), (False, UNHOLD)])
def test_a_freeze_that_cannot_be_taken_back_is_undone_once_it_is_answered(ok, then) -> None:
    move = OneMove()
    move.advance(FREEZE)
    freeze = move.steps[-1]
    move.moves.on_leave("d")
    assert move.moves.is_under_way("q")
    assert move.moves.of("q") is None
    move.moves.on_answer(Answered("s", freeze.move, FREEZE, ok), 0.0)
    assert move.steps[-1].verb is then
    assert not move.moves.is_under_way("q")


def test_a_freeze_that_is_answered_late_is_given_up_once() -> None:
    move = OneMove(course=WAITS_FOR_CAPACITY)
    move.answer()
    freeze = move.steps[-1]
    for now in (ANSWER_SECONDS, ANSWER_SECONDS + 0.1):
        move.moves.on_tick(now)
    assert [step.verb for step in move.steps] == [RESERVE, FREEZE, RELEASE]
    assert move.outcomes == [MoveEnd.FAILED]
    assert move.moves.next_time == inf
    move.moves.on_answer(Answered("s", freeze.move, FREEZE, ok=True), ANSWER_SECONDS + 1.0)
    assert move.steps[-1].verb is REATTACH
    assert not move.moves.is_under_way("q")


@pytest.mark.parametrize("verb", [RESERVE, HOLD, FREEZE, ADOPT])
def test_the_death_of_the_source_or_the_end_of_the_request_gives_the_room_back(verb) -> None:
    for end in (lambda moves: moves.on_lost("s"), lambda moves: moves.drop("q")):
        move = OneMove()
        move.advance(verb)
        move.asked()
        end(move.moves)
        assert ("d", RELEASE) in move.asked()
        assert move.outcomes == [MoveEnd.CANCELLED]
        assert not move.moves.is_under_way("q")


def test_what_takes_too_long_is_given_up_the_sooner_where_the_request_stands_still() -> None:
    move = OneMove()
    assert move.moves.next_time == ANSWER_SECONDS
    move.now = 5.0
    move.advance(ADOPT)
    assert move.moves.next_time == 5.0 + STILL_SECONDS
    move.moves.on_tick(6.0)
    assert [step.verb for step in move.steps[-2:]] == [RELEASE, REATTACH]
    assert move.outcomes == [MoveEnd.FAILED]


def test_a_late_answer_changes_nothing() -> None:
    move = OneMove()
    late = move.steps[-1]
    move.moves.drop("q")
    move.asked()
    move.moves.on_answer(Answered("d", late.move, RESERVE, ok=True), 1.0)
    assert move.asked() == [("s", UNHOLD)]


def test_a_request_that_waits_for_room_stands_still_until_somebody_has_room() -> None:
    move = OneMove(course=WAITS_FOR_CAPACITY)
    assert move.asked() == [("d", RESERVE)]
    move.answer(ok=False)
    (waiting,) = move.waiting
    assert (move.outcomes, move.moves.next_time) == ([], inf)
    assert move.moves.num_to("d") == 0
    move.now = 100.0
    move.moves.try_again(waiting, "e", num_blocks=30, now=100.0)
    for num_blocks in (0, 30, 0, 0):
        move.answer(num_blocks=num_blocks)
    assert move.asked() == [
        *(("e", RESERVE), ("s", FREEZE), ("e", PULL), ("e", ADOPT), ("e", TAKE)),
    ]
    assert move.outcomes == [MoveEnd.MOVED]


def test_a_request_that_waits_for_room_goes_on_where_it_is_if_nobody_ever_will() -> None:
    move = OneMove(course=WAITS_FOR_CAPACITY)
    move.answer(ok=False)
    move.moves.stay(move.waiting[0])
    assert move.asked() == [("s", REATTACH)]
    assert move.outcomes == [MoveEnd.NO_CAPACITY]


def test_a_request_that_waits_for_room_that_ends_leaves_nothing() -> None:
    move = OneMove(course=WAITS_FOR_CAPACITY)
    move.answer(ok=False)
    move.moves.drop("q")
    assert move.asked() == [("s", UNHOLD)]
    assert (move.outcomes, move.moves.of("q")) == ([MoveEnd.CANCELLED], None)


def test_a_prompt_is_copied_as_it_is_computed() -> None:
    move = OneMove(course=COPIED_AHEAD)
    assert move.moves.next_time == inf, "it may have to wait for its turn"
    assert (move.moves.num_to("d"), move.moves.num_coming("d")) == (0, 1)
    for num_blocks in (10, 0, 0, 12, 0):
        move.answer(num_blocks=num_blocks)
    assert move.moves.on_first_token("q", 0.0)
    for num_blocks in (31, 0, 0):
        move.answer(num_blocks=num_blocks)
    assert [(step.replica, step.verb, step.num_blocks) for step in move.steps] == [
        ("s", HOLD, 1),
        ("d", RESERVE, 34),
        ("d", PULL, 0),
        ("s", HOLD, 11),
        ("d", PULL, 10),
        ("s", HOLD, 13),
        ("s", FREEZE, 0),
        ("d", PULL, 12),
        ("d", ADOPT, 0),
        ("d", TAKE, 0),
    ]
    assert move.outcomes == [MoveEnd.MOVED]


@pytest.mark.parametrize(
    ("num_answers", "then"),
    [(0, [("d", RESERVE)]), (1, []), (2, []), (3, [("s", FREEZE)])],
    ids=["before the first chunk", "room is asked for", "a copy is under way", "all is copied"],
)
def test_the_first_token_may_come_at_any_stage(num_answers, then) -> None:
    move = OneMove(course=COPIED_AHEAD)
    for num_blocks in (10, 0, 0)[:num_answers]:
        move.answer(num_blocks=num_blocks)
    move.asked()
    assert move.moves.on_first_token("q", 5.0)
    assert move.asked()[-len(then) :] == then or not then
    assert move.moves.next_time == 5.0 + STILL_SECONDS
    while move.steps[-1].verb is not TAKE:
        move.answer(num_blocks=31)
    assert move.outcomes == [MoveEnd.MOVED]


def test_a_prompt_for_which_there_is_no_room_is_computed_all_the_same() -> None:
    move = OneMove(course=COPIED_AHEAD)
    move.answer(num_blocks=10)
    move.asked()
    move.answer(ok=False)
    assert move.asked() == [("d", RELEASE), ("s", UNHOLD)]
    assert move.outcomes == [MoveEnd.NO_CAPACITY]
    assert not move.moves.on_first_token("q", 1.0), "it is moved like any other"


def test_a_stream_goes_on_at_its_source_if_there_is_no_room_once_its_prompt_is_done() -> None:
    move = OneMove(course=COPIED_AHEAD)
    move.moves.on_first_token("q", 1.0)
    move.answer(ok=False)
    assert [(step.replica, step.verb) for step in move.steps[-2:]] == [("d", RELEASE), ("s", REATTACH)]
