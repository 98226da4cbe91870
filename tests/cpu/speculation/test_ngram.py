"""Prompt lookup: what is found, how it goes on, and that it agrees with a plain search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.request import Request
from onbeat.core.step import AdmittedRequest
from onbeat.engine.input_batch import InputBatch
from onbeat.engine.speculation.build import NgramProposer
from onbeat.engine.speculation.proposer import DraftRow
from tests.cpu.speculation.runs import ngram


class Conversation:
    """One request in a slot of an input batch, and a proposer that reads it."""

    def __init__(self, proposer: NgramProposer, token_ids: list[int]) -> None:
        self.proposer = proposer
        self.batch = InputBatch(max_num_seqs=2, max_model_len=512, block_size=16)
        request = Request(request_id="a", prompt_token_ids=tuple(token_ids))
        self.slot = self.batch.admit(AdmittedRequest(request, (), tuple(range(32))))
        proposer.release(self.slot)  # it may have been another's
        self.num_tokens = len(token_ids)

    def say(self, *token_ids: int) -> None:
        end = self.num_tokens + len(token_ids)
        self.batch.token_ids_SP[self.slot, self.num_tokens : end] = token_ids
        self.num_tokens = end

    def drafts(self, num_drafts: int) -> list[int]:
        rows = [DraftRow(self.slot, self.num_tokens, num_drafts)]
        (drafts,) = self.proposer.propose(self.batch, rows)
        return drafts

    @property
    def num_available(self) -> int:
        (num,) = self.proposer.num_available(self.batch, [self.slot], [self.num_tokens])
        return num


def test_what_followed_before_follows_again() -> None:
    request = Conversation(ngram(4), [1, 2, 3, 4, 5, 6, 7, 2, 3])
    assert request.drafts(2) == [4, 5]
    assert request.drafts(9) == [4, 5, 6]
    assert request.num_available == 3


def test_new_tokens_have_no_drafts() -> None:
    request = Conversation(ngram(4), [1, 2, 3, 4])
    assert request.drafts(3) == []
    assert request.num_available == 0


def test_the_longest_match_comes_first() -> None:
    proposer = ngram(1, prompt_lookup_max=3, prompt_lookup_min=1)
    assert Conversation(proposer, [1, 2, 3, 10, 2, 3, 20, 3, 30, 1, 2, 3]).drafts(1) == [10]
    assert Conversation(proposer, [1, 2, 3, 10, 2, 3, 20, 3, 30, 9, 2, 3]).drafts(1) == [20]
    assert Conversation(proposer, [1, 2, 3, 10, 2, 3, 20, 3, 30, 9, 9, 3]).drafts(1) == [30]


def test_of_equal_matches_the_most_recent_counts() -> None:
    proposer = ngram(1, prompt_lookup_max=2, prompt_lookup_min=2)
    assert Conversation(proposer, [1, 2, 3, 1, 2, 4, 1, 2]).drafts(1) == [4]


def test_shorter_matches_than_the_minimum_do_not_count() -> None:
    proposer = ngram(1, prompt_lookup_max=3, prompt_lookup_min=2)
    assert Conversation(proposer, [1, 2, 3, 9, 2]).drafts(1) == []


def test_a_repetition_goes_on_beyond_what_is_known() -> None:
    proposer = ngram(9, prompt_lookup_max=6)
    assert Conversation(proposer, [5, 6, 7] * 3).drafts(8) == [5, 6, 7, 5, 6, 7, 5, 6]
    assert Conversation(proposer, [5] * 4).drafts(4) == [5, 5, 5, 5]


def test_a_longer_match_gives_more_drafts_up_to_the_most() -> None:
    request = Conversation(ngram(8, prompt_lookup_max=2, prompt_lookup_min=2), [*range(1, 30), 1, 2])
    numbers = []
    for token_id in range(3, 9):
        numbers.append(request.num_available)
        assert request.drafts(20) == list(range(token_id, token_id + int(1.5 * (token_id - 1))))
        request.say(token_id)
    assert numbers == [3, 4, 6, 7, 8, 8]


def test_a_match_that_came_true_is_followed_rather_than_a_later_one() -> None:
    """The answer repeats a prompt in which an n-gram occurs twice: what was before tells the place."""
    prompt = [1, 2, 8, 8, 3, 4, 5, 6, 8, 8, 9, 7, 70]
    request = Conversation(ngram(4, prompt_lookup_max=2, prompt_lookup_min=2), prompt)
    request.say(1, 2)
    assert request.drafts(2) == [8, 8]
    request.say(8, 8)
    assert request.drafts(2) == [3, 4]  # after the later "8, 8" came 9
    request.say(3, 4, 5)
    assert request.drafts(2) == [6, 8]


def test_a_match_that_did_not_come_true_is_left() -> None:
    request = Conversation(ngram(4, prompt_lookup_max=2, prompt_lookup_min=2), [1, 2, 3, 4, 5, 6, 1, 2])
    assert request.drafts(2) == [3, 4]
    request.say(3, 5, 6)
    assert request.drafts(2) == [1, 2]
    request.say(50)
    assert request.drafts(2) == []


def test_slots_are_used_again() -> None:
    proposer = ngram(2)
    first = Conversation(proposer, [1, 2, 3, 1, 2])
    assert first.drafts(1) == [3]
    proposer.release(first.slot)
    assert Conversation(proposer, [1, 2, 9, 9, 8]).drafts(1) == []


def plain_search(token_ids: list[int], longest: int, shortest: int) -> int | None:
    """Return the position after the most recent of the longest matches."""
    for length in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for end in range(len(token_ids) - 1, length - 1, -1):
            if token_ids[end - length : end] == token_ids[-length:]:
                return end
    return None


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_it_finds_what_a_plain_search_finds(token_ids: list[int], shortest: int, more: int) -> None:
    longest = shortest + more
    request = Conversation(ngram(5, prompt_lookup_max=longest, prompt_lookup_min=shortest), token_ids)
    place = plain_search(token_ids, longest, shortest)
    if place is None:
        assert request.drafts(5) == []
        return
    expected = list(token_ids)
    for source in range(place, place + 5):
        expected.append(expected[source])
    drafts = request.drafts(5)
    assert drafts == expected[len(token_ids) :][: len(drafts)]
    assert len(drafts) == request.num_available >= 1


@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), min_size=1, max_size=12),
    shortest=st.integers(1, 2),
)
def test_drafts_always_follow_an_occurrence_of_the_last_tokens(
    pieces: list[list[int]], shortest: int
) -> None:
    """However the tokens come, the drafts follow a match as long as a plain search finds."""
    longest = shortest + 2
    request = Conversation(ngram(3, prompt_lookup_max=longest, prompt_lookup_min=shortest), pieces[0])
    known = list(pieces[0])
    for piece in pieces[1:]:
        request.drafts(1)
        request.say(*piece)
        known += piece
    drafts = request.drafts(1)
    place = plain_search(known, longest, shortest)
    assert bool(drafts) == (place is not None)
    if place is not None:
        length = next(n for n in range(longest, 0, -1) if known[place - n : place] == known[-n:])
        followers = {
            known[end] for end in range(length, len(known)) if known[end - length : end] == known[-length:]
        }
        assert drafts[0] in followers


def test_a_long_prompt_is_read_at_once_and_then_token_by_token() -> None:
    generator = np.random.default_rng(0)
    prompt = generator.integers(0, 30, 500).tolist()
    whole = Conversation(ngram(4), prompt)
    pieces = Conversation(ngram(4), prompt[:100])
    for token_id in prompt[100:]:
        pieces.say(token_id)
        assert len(pieces.drafts(4)) == pieces.num_available
    assert bool(whole.drafts(4)) == bool(pieces.drafts(4))


@pytest.mark.parametrize("length", [1, 2, 3])
def test_requests_shorter_than_a_match(length: int) -> None:
    proposer = ngram(3, prompt_lookup_max=5, prompt_lookup_min=4)
    assert Conversation(proposer, [1] * length).drafts(3) == []


@given(
    token_ids=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    cuts=st.sets(st.integers(1, 59), max_size=6),
)
def test_it_does_not_matter_when_tokens_are_read(token_ids: list[int], cuts: set[int]) -> None:
    """Asked after each token or now and then, a request has drafts in the same places."""
    often, seldom = (
        Conversation(ngram(4, prompt_lookup_max=3, prompt_lookup_min=2), token_ids[:1]) for _ in range(2)
    )
    for num_tokens, token_id in enumerate(token_ids[1:], 2):
        often.say(token_id)
        seldom.say(token_id)
        available = often.num_available
        assert len(often.drafts(4)) == available
        if num_tokens in cuts:
            assert bool(seldom.num_available) == bool(available)
    assert bool(seldom.drafts(4)) == bool(often.drafts(4))
