"""Acceptance is the conditional rate of a token, and follows what it becomes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import SLOState
from onbeat.scheduler.replica.speculation.acceptance import WINDOW, AcceptanceBook
from tests.pure.scheduler.speculating import make_request


def make_state(request_id: str = "r0", slo_class: str | None = None) -> RequestState:
    request = make_request(request_id, 8, 10_000, slo_class=slo_class)
    return RequestState(request, sort_key=(0,), max_model_len=1 << 20, slo=SLOState())


def draw_accepted(random: Random, acceptance: float, num_drafts: int) -> int:
    num = 0
    while num < num_drafts and random.random() < acceptance:
        num += 1
    return num


def feed(book: AcceptanceBook, state: RequestState, accepted: list[int], num_drafts: int) -> None:
    for num in accepted:
        book.observe(state, num_drafted=num_drafts, num_accepted=num, num_available=None)


@pytest.mark.parametrize("window", [WINDOW, 100])
@pytest.mark.parametrize("num_drafts", [1, 4])
def test_follows_a_step_of_acceptance(window, num_drafts):
    estimates = []
    for seed in range(100):
        random, book, state = Random(seed), AcceptanceBook(0.5, window=window), make_state()
        feed(book, state, [draw_accepted(random, 0.9, num_drafts) for _ in range(200)], num_drafts)
        feed(book, state, [draw_accepted(random, 0.3, num_drafts) for _ in range(150)], num_drafts)
        estimates.append(book.of(state).acceptance)
    assert sum(estimates) / len(estimates) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("window", [WINDOW, 100])
def test_follows_a_regular_feed(window):
    book, state = AcceptanceBook(0.5, window=window), make_state()
    feed(book, state, [1, 1, 1, 1, 0, 1, 1, 1, 1, 1] * 20, 1)
    assert book.of(state).acceptance == pytest.approx(0.9, abs=0.05)
    feed(book, state, [0, 1, 0, 0, 1, 0, 0, 1, 0, 0] * 15, 1)
    assert book.of(state).acceptance == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize("num_drafts", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("acceptance", [0.2, 0.5, 0.8])
def test_is_not_biased_by_the_number_of_drafts(num_drafts, acceptance):
    random, book, state = Random(0), AcceptanceBook(0.5, window=4000), make_state()
    feed(book, state, [draw_accepted(random, acceptance, num_drafts) for _ in range(4000)], num_drafts)
    assert book.of(state).acceptance == pytest.approx(acceptance, abs=0.025)


def test_a_new_request_is_like_others_of_its_class():
    book = AcceptanceBook(0.5)
    for index in range(20):
        feed(book, make_state(f"a{index}", "edit"), [4, 4, 3, 4, 4], 4)
        feed(book, make_state(f"b{index}", "chat"), [0, 0, 1, 0, 0], 4)
    edit, chat = (book.of(make_state("new", name)).acceptance for name in ("edit", "chat"))
    assert edit > 0.9
    assert chat < 0.3
    other = book.of(make_state("new", "unseen")).acceptance
    assert chat < other < edit, "an unknown class is like all requests together"


def test_begins_with_what_was_configured():
    assert AcceptanceBook(0.37).of(make_state()).acceptance == pytest.approx(0.37)


def test_a_new_request_follows_its_class_while_it_has_shown_nothing():
    book, idle = AcceptanceBook(0.9), make_state("idle")
    before = book.of(idle).acceptance
    feed(book, make_state("busy"), [0] * 200, 1)
    assert book.of(idle).acceptance < 0.2 < before


@given(st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=200))
def test_is_a_probability_and_counts_the_window_alone(rows):
    book, state = AcceptanceBook(0.5, window=8), make_state()
    for num_drafted, num_accepted in rows:
        num = min(num_drafted, num_accepted)
        book.observe(state, num_drafted=num_drafted, num_accepted=num, num_available=None)
        assert 0 < book.of(state).acceptance < 1
    rate, kept = book.of(state), [(d, min(d, a)) for d, a in rows if d][-8:]
    num_accepted = sum(accepted for _, accepted in kept)
    num_tried = sum(accepted + (accepted < drafted) for drafted, accepted in kept)
    prior = AcceptanceBook(0.5, window=8).of(make_state()).acceptance if not kept else None
    if prior is not None:
        assert rate.acceptance == prior
    else:
        low, high = num_accepted / (4 + num_tried), (4 + num_accepted) / (4 + num_tried)
        assert low <= rate.acceptance <= high


def test_drafts_of_which_many_are_ready_are_trusted_more():
    """As with prompt lookup: long matches, of which many drafts are ready, come true, short ones seldom."""
    book, state = AcceptanceBook(0.5), make_state()
    for turn in range(200):
        short = turn % 2
        book.observe(state, num_drafted=0, num_accepted=0, num_available=3 if short else 12)
        book.observe(state, num_drafted=3, num_accepted=0 if short else 3, num_available=None)
    rate = book.of(state)
    rate.num_available = 3
    assert rate.acceptance < 0.15
    rate.num_available = 12
    assert rate.acceptance > 0.9
    rate.num_available = None
    assert 0.6 < rate.acceptance < 0.9  # three accepted for each one rejected
    newcomer = book.of(make_state("new"))
    newcomer.num_available = 3
    assert newcomer.acceptance < 0.2


def test_idle_deliveries_are_counted_until_the_next_draft():
    book, state = AcceptanceBook(0.5), make_state()
    for _ in range(3):
        book.observe(state, num_drafted=0, num_accepted=0, num_available=2)
    assert (book.of(state).num_idle, book.of(state).num_available) == (3, 2)
    book.observe(state, num_drafted=1, num_accepted=0, num_available=None)
    assert (book.of(state).num_idle, book.of(state).num_available) == (0, None)
