"""States kept for prefix hits, of models that need one to go on: when, where, and who goes on."""

from __future__ import annotations

import pytest

from onbeat.core.step import SchedulerOutput
from tests.pure.scheduler.driver import Driver, make_config, make_request

SHARED = list(range(70))
"""Four blocks and six tokens."""


class Watching(Driver):
    """Remembers what each step keeps, and from which states requests go on."""

    def __init__(self, num_snapshots: int | None) -> None:
        super().__init__(make_config(max_num_batched_tokens=128, num_snapshots=num_snapshots))
        self.kept: list[tuple[str, int, int]] = []
        self.begun: dict[str, tuple[int | None, int]] = {}

    def check_step(self, scheduled: SchedulerOutput) -> None:
        super().check_step(scheduled)
        for index, num_tokens, snapshot in scheduled.kept_states:
            row = scheduled.rows[index]
            self.kept.append((row.request_id, row.num_computed_tokens + num_tokens, snapshot))
        starts = {row.request_id: row.num_computed_tokens for row in scheduled.rows}
        for admitted in scheduled.admitted:
            request_id = admitted.request.request_id
            self.begun[request_id] = admitted.snapshot, starts[request_id]

    def ask(self, request_id: str, prompt: list[int]) -> None:
        self.add(make_request(request_id, 0, 3, prompt=prompt, salt="all"))
        self.run()


def test_a_prompt_is_kept_at_its_last_block_and_where_others_part_from_it() -> None:
    driver = Watching(8)
    driver.ask("first", [*SHARED, 1, 2, 3])
    driver.ask("second", [*SHARED, *range(200, 240)])
    driver.ask("third", [*SHARED, *range(300, 340)])
    driver.ask("again", [*SHARED, *range(200, 260)])
    assert [(name, num_tokens) for name, num_tokens, _ in driver.kept] == [
        ("first", 64),
        ("second", 96),
        ("third", 96),
        ("again", 128),
    ]
    places = {name: snapshot for name, _, snapshot in driver.kept}
    assert driver.begun == {
        "first": (None, 0),
        "second": (places["first"], 64),
        "third": (places["first"], 64),
        "again": (places["second"], 96),
    }


def test_a_second_prompt_shows_where_the_first_parted() -> None:
    """The first is kept at its end alone, which the second does not share; the third finds the rest."""
    driver = Watching(8)
    driver.ask("first", [*SHARED, *range(100, 130)])
    driver.ask("second", [*SHARED, *range(200, 230)])
    driver.ask("third", [*SHARED, *range(300, 330)])
    assert [num_tokens for name, num_tokens, _ in driver.kept if name == "second"] == [64, 96]
    assert [driver.begun[name][1] for name in ("first", "second", "third")] == [0, 0, 64]


@pytest.mark.parametrize("num_snapshots", [1, 2])
def test_the_least_recently_used_goes_first(num_snapshots: int) -> None:
    driver = Watching(num_snapshots)
    chats = {name: [*range(start, start + 40)] for name, start in (("a", 0), ("b", 100), ("c", 200))}
    for turn in range(2):
        for name, prompt in chats.items():
            driver.ask(f"{name}{turn}", prompt)
    assert all(start == 0 for _, start in driver.begun.values())  # each was gone when it came again
    driver.ask("c2", chats["c"])
    assert driver.begun["c2"][1] == 32
    assert {snapshot for _, _, snapshot in driver.kept} == set(range(num_snapshots))


def test_a_step_keeps_each_state_in_a_place_of_its_own() -> None:
    driver = Watching(2)
    for index in range(4):
        prompt = list(range(100 * index, 100 * index + 20))
        driver.add(make_request(f"r{index}", 0, 3, prompt=prompt, salt="all"))
    driver.run()
    assert [snapshot for _, _, snapshot in driver.kept] == [0, 1]
    assert driver.scheduler.kv.snapshots.num_used == 2


def test_a_place_that_is_taken_for_a_move_keeps_no_state_meanwhile() -> None:
    driver = Watching(1)
    handover = driver.scheduler.handover
    driver.ask("before", list(range(20)))
    assert handover.reserve("move", 20, 100.0) is not None  # what was kept goes
    assert handover.reserve("second", 20, 100.0) is None
    driver.ask("meanwhile", list(range(100, 120)))
    assert (len(driver.kept), driver.scheduler.kv.snapshots.num_used) == (1, 1)
    handover.release_reservation("move")
    assert driver.scheduler.kv.snapshots.num_used == 0
    driver.ask("after", list(range(200, 220)))
    assert len(driver.kept) == 2


def test_models_without_states_keep_none() -> None:
    driver = Watching(None)
    assert driver.scheduler.kv.snapshots.num_used is None
    driver.ask("first", [*SHARED, 1, 2, 3])
    driver.ask("second", [*SHARED, 4])
    assert not driver.kept
    assert driver.begun["second"] == (None, 64)
