"""The stages of a move as data: what is drawn in the documents, and that each answer leads to a stage."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.policies.distserve import WAITS_FOR_CAPACITY
from benchmarks.policies.splitwise import COPIED_AHEAD
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.moves import RUNS, STANDS_STILL, Course, Lack, Stage

DOCUMENT = Path(__file__).parents[3] / "docs" / "maintainers" / "fleet_decisions.md"
COURSES = {"runs": RUNS, "stands still": STANDS_STILL, "copied ahead": COPIED_AHEAD}


def drawn() -> list[dict[Stage, tuple[Stage | None, ...]]]:
    """Return the tables of the section on stages."""
    text = DOCUMENT.read_text().partition("### Stages")[2].partition("What may go wrong")[0]
    tables: list[dict[Stage, tuple[Stage | None, ...]]] = []
    stages = {each.value[0]: each for each in Stage}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|")]
        if line.startswith("| stage |"):
            tables.append({})
        elif re.match(r"\| [a-z]", line):
            name, verb, *following = cells
            stage = stages[name]
            assert stage.verb == verb.strip("`")
            tables[-1][stage] = tuple(stages.get(cell) for cell in following)
    return tables


def test_the_document_draws_what_is_done() -> None:
    assert drawn() == [dict(course.next) for course in COURSES.values()]


def reached(course: Course) -> set[Stage]:
    """Return the stages that a move comes to."""
    found = {course.first}
    while following := {each for stage in found for each in course.next.get(stage, ()) if each} - found:
        found |= following
    return found


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_each_stage_that_is_reached_has_a_next_one_for_each_answer(course: Course) -> None:
    for stage in reached(course) - {Stage.ADOPT}:
        expected = {Lack.NOTHING}
        if stage.verb in (MoveVerb.HOLD, MoveVerb.FREEZE):  # more is lent
            expected = set(Lack)
        elif stage.verb is MoveVerb.RESERVE and not (course is RUNS and stage is Stage.RESERVE):
            expected = {Lack.BLOCKS, Lack.NOTHING}
        assert {lack for lack in Lack if course.next[stage][lack]} == expected, stage


def test_every_move_ends_with_the_adoption_of_its_request() -> None:
    assert all(Stage.ADOPT in reached(course) for course in (RUNS, STANDS_STILL))
    assert Stage.ADOPT not in reached(COPIED_AHEAD), "it has had no token"


def test_the_first_token_finds_each_stage_of_a_prompt_with_a_next_one() -> None:
    asked_anew = COPIED_AHEAD.on_first_token
    assert asked_anew is not None
    assert all(asked_anew.get(stage, stage) in STANDS_STILL.next for stage in reached(COPIED_AHEAD))


def test_who_waits_for_room_takes_the_stages_of_who_stands_still() -> None:
    assert (WAITS_FOR_CAPACITY.first, WAITS_FOR_CAPACITY.next) == (STANDS_STILL.first, STANDS_STILL.next)
