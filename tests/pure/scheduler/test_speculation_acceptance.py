"""Acceptance is the conditional rate of a token, and follows what it becomes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.request_state import RequestState, SLOState
from onbeat.scheduler.replica.speculation.drafting import KEPT, AcceptanceRates
from tests.pure.scheduler.speculating import make_request


def make_state(request_id: str = "r0", slo_class: str | None = None) -> RequestState:
    request = make_request(request_id, 8, 10_000, slo_class=slo_class)
    return RequestState(request, sort_key=(0,), max_model_len=1 << 20, slo=SLOState())


def draw_accepted(random: Random, acceptance: float, num_drafts: int) -> int:
    num = 0
    while num < num_drafts and random.random() < acceptance:
        num += 1
    return num


def feed(book: AcceptanceRates, state: RequestState, accepted: list[int], num_drafts: int) -> None:
    """A row of one step after the other."""
    for num in accepted:
        book.begin_step()
        book.observe(state, num_drafted=num_drafts, num_accepted=num, num_available=None)


@pytest.mark.parametrize("kept", [KEPT, 0.95])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_follows_a_step_of_acceptance(kept, num_drafts):
    estimates = []
    for seed in range(100):
        random, book, state = Random(seed), AcceptanceRates(0.5, kept=kept), make_state()
        feed(book, state, [draw_accepted(random, 0.9, num_drafts) for _ in range(200)], num_drafts)
        feed(book, state, [draw_accepted(random, 0.3, num_drafts) for _ in range(150)], num_drafts)
        estimates.append(book.of(state))
    assert sum(estimates) / len(estimates) == pytest.approx(0.3, abs=0.05)


def test_follows_a_regular_feed():
    book, state = AcceptanceRates(0.5), make_state()
    feed(book, state, [1, 1, 1, 1, 0, 1, 1, 1, 1, 1] * 20, 1)
    assert book.of(state) == pytest.approx(0.9, abs=0.05)
    feed(book, state, [0, 1, 0, 0, 1, 0, 0, 1, 0, 0] * 15, 1)
    assert book.of(state) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
def test_is_not_biased_by_the_number_of_drafts(num_drafts, acceptance):
    random, book, state = Random(0), AcceptanceRates(0.5, kept=1.0), make_state()
    feed(book, state, [draw_accepted(random, acceptance, num_drafts) for _ in range(4000)], num_drafts)
    assert book.of(state) == pytest.approx(acceptance, abs=0.025)


def test_a_new_request_is_like_others_of_its_class():
    book = AcceptanceRates(0.5)
    for index in range(20):
        feed(book, make_state(f"a{index}", "edit"), [4, 4, 3, 4, 4], 4)
        feed(book, make_state(f"b{index}", "chat"), [0, 0, 1, 0, 0], 4)
    edit, chat = (book.of(make_state("new", name)) for name in ("edit", "chat"))
    assert edit > 0.9
    assert chat < 0.3
    other = book.of(make_state("new", "unseen"))
    assert chat < other < edit, "an unknown class is like all requests together"


def test_begins_with_what_was_configured():
    assert AcceptanceRates(0.37).of(make_state()) == pytest.approx(0.37)


def test_a_new_request_follows_its_class_while_it_has_shown_nothing():
    book, idle = AcceptanceRates(0.9), make_state("idle")
    before = book.of(idle)
    feed(book, make_state("busy"), [0] * 200, 1)
    assert book.of(idle) < 0.2 < before


def test_what_is_old_gives_way_to_a_probe():
    """After many steps without drafts one row moves the rate; a row among many hardly does."""
    state = make_state()
    moved = []
    for num_idle in (0, 400):
        book = AcceptanceRates(0.5)
        feed(book, state, [0] * 300, 1)
        for _ in range(num_idle):
            book.begin_step()
        before = book.of(state)
        feed(book, state, [4], 4)
        moved.append(book.of(state) - before)
    assert 0 < 1.5 * moved[0] < moved[1] < 0.5


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16), st.integers(0, 60)), max_size=200))
def test_is_a_probability_that_only_drafts_move(rows):
    book, state = AcceptanceRates(0.5), make_state()
    for num_drafted, num_accepted, num_steps in rows:
        before = book.of(state)
        for _ in range(num_steps):
            book.begin_step()
        num = min(num_drafted, num_accepted)
        book.observe(state, num_drafted=num_drafted, num_accepted=num, num_available=None)
        after = book.of(state)
        assert 0 < after < 1
        if not num_drafted:
            assert after == before
        elif not num:
            assert after < before
        elif num == num_drafted:
            assert after > before


def test_what_is_ready_for_the_next_step_is_kept():
    book, state = AcceptanceRates(0.5), make_state()
    book.observe(state, num_drafted=0, num_accepted=0, num_available=2)
    assert state.draft.num_ready == 2
    book.observe(state, num_drafted=1, num_accepted=0, num_available=None)
    assert state.draft.num_ready is None
