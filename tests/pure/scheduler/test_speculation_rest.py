"""Nobody looks for drafts while that does not pay, and somebody does again when things may have changed."""

from __future__ import annotations

from onbeat.scheduler.replica.speculation.rest import Rest
from tests.pure.scheduler.speculating import DraftStepTime
from tests.pure.scheduler.test_speculation_adaptive import make_driver

NO_GAIN, LARGE_GAIN = 0.0, 5e-3
MANY = 32


def look_until_rest(rest: Rest, num_rows: int, saved: float = NO_GAIN, most: int = 2000) -> int:
    """Return the number of looks before the next rest; `most` where none begins."""
    for count in range(most):
        if rest.goes_on(num_rows, 0):
            return count
        rest.look(num_rows, saved)
    return most


def rest_until_look(rest: Rest, num_rows: int, num_newcomers: int = 0) -> int:
    """Return the number of further steps that a rest goes on for."""
    count = 0
    while rest.goes_on(num_rows, num_newcomers):
        count += 1
    return count


def test_looking_goes_on_while_it_pays() -> None:
    assert look_until_rest(Rest(), MANY, LARGE_GAIN) == 2000


def test_many_rows_are_judged_within_few_steps() -> None:
    assert look_until_rest(Rest(), MANY) <= 20


def test_a_single_row_is_given_time() -> None:
    """The end of an answer repeats the prompt, its beginning does not."""
    assert look_until_rest(Rest(), 1) >= 400


def test_rests_become_longer_and_looks_between_them_are_short() -> None:
    rest = Rest()
    looks, rests = [], []
    for _ in range(8):
        looks.append(look_until_rest(rest, MANY))
        rests.append(rest_until_look(rest, MANY))
    assert rests == sorted(rests)
    assert rests[-1] > 4 * rests[0]
    assert max(looks[1:]) <= 5
    assert sum(looks[4:]) < 0.1 * sum(rests[4:])


def test_a_gain_ends_the_rests() -> None:
    rest = Rest()
    look_until_rest(rest, MANY)
    rest_until_look(rest, MANY)
    assert rest.has_ended
    assert look_until_rest(rest, MANY, LARGE_GAIN) == 2000
    assert not rest.has_ended


def test_a_gain_smaller_than_the_time_of_looking_does_not() -> None:
    assert look_until_rest(Rest(), MANY, 1e-5) < 20


def test_another_batch_ends_a_rest_at_once() -> None:
    for num_rows in (MANY // 2, 2 * MANY):
        rest = Rest()
        look_until_rest(rest, MANY)
        assert rest_until_look(rest, num_rows) == 0


def test_newcomers_end_a_rest() -> None:
    rest = Rest()
    look_until_rest(rest, MANY)
    assert rest_until_look(rest, MANY, num_newcomers=8) <= MANY // 8


def test_a_scheduler_asks_for_no_drafts_while_it_rests() -> None:
    """A batch bound by arithmetic, of requests for which nothing is ever found."""
    driver = make_driver(MANY, 0.2, num_tokens=400, model=DraftStepTime(per_token=1e-3), available=(0, 1))
    driver.run()
    driver.check_end()
    decoding = [scheduled for scheduled in driver.log if scheduled.shape.num_decodes]
    asking = [scheduled for scheduled in decoding if scheduled.asks_available]
    assert len(asking) < 0.35 * len(decoding)
    assert all(not scheduled.shape.num_draft_tokens for scheduled in decoding if not scheduled.asks_available)


def test_it_finds_drafts_again_after_a_rest() -> None:
    driver = make_driver(MANY, 0.95, num_tokens=900, available=(0,))
    for _ in range(400):
        driver.step()
    assert not all(scheduled.asks_available for scheduled in driver.log[-100:])
    driver.runner._available = (8,)
    for _ in range(160):
        driver.step()
    assert all(scheduled.shape.num_draft_tokens > MANY for scheduled in driver.log[-5:])
