"""Text in pieces: the same text as decoding at once, nothing split, no stop string leaked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.text.stream import TextStream, holds_text
from tests.fakes_engine import BOS, EOS, THINK, ByteTokenizer, LeadingSpaceTokenizer

TOKENIZER = ByteTokenizer()


def run(token_ids, *, pieces=None, tokenizer=TOKENIZER, **options):
    """Push ids in pieces of the given sizes (default: one at a time); return all deltas."""
    stream = TextStream(tokenizer, **options)
    sizes = iter(pieces or [])
    deltas, start = [], 0
    while start < len(token_ids):
        end = min(start + next(sizes, 1), len(token_ids))
        deltas.append(stream.push(token_ids[start:end], final=end == len(token_ids)))
        start = end
    return deltas, stream


def text_of(deltas) -> str:
    return "".join(delta.text for delta in deltas)


@given(text=st.text(max_size=40), pieces=st.lists(st.integers(1, 7), max_size=30))
@pytest.mark.parametrize("tokenizer", [TOKENIZER, LeadingSpaceTokenizer()], ids=["bytes", "leading-space"])
def test_pieces_join_to_the_whole_text(tokenizer, text, pieces):
    ids = list(text.encode())
    deltas, _ = run(ids, pieces=pieces, tokenizer=tokenizer)
    assert text_of(deltas) == tokenizer.decode(ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in delta.text for delta in deltas), "a split character"


@given(text=st.text(" ab", max_size=10), pieces=st.lists(st.integers(1, 7), max_size=10))
def test_a_text_that_goes_on_keeps_its_leading_space(text, pieces):
    deltas, _ = run(
        list(text.encode()), pieces=pieces, tokenizer=LeadingSpaceTokenizer(), continues_text=True
    )
    assert text_of(deltas) == text


def test_a_stop_string_finds_the_leading_space_of_a_text_that_goes_on():
    options = {"tokenizer": LeadingSpaceTokenizer(), "stop": [" Paris"]}
    deltas, stream = run(list(b" Paris."), continues_text=True, **options)
    assert (text_of(deltas), stream.num_consumed_tokens) == ("", 6)
    assert text_of(run(list(b" Paris."), **options)[0]) == "Paris."


def test_special_tokens_are_no_text_to_go_on_from():
    assert not holds_text([BOS, THINK], TOKENIZER)
    assert not holds_text([], TOKENIZER)
    assert holds_text([BOS, *b"a"], TOKENIZER)


@given(ids=st.lists(st.integers(0, 259), max_size=40), pieces=st.lists(st.integers(1, 7), max_size=30))
@pytest.mark.parametrize("skip", [True, False])
def test_any_tokens_end_with_all_their_text(ids, pieces, skip):
    deltas, stream = run(ids, pieces=pieces, skip_special_tokens=skip)
    expected = TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert text_of(deltas) == expected
    assert stream.num_consumed_tokens == len(ids)


def test_a_character_waits_for_its_last_byte():
    deltas, _ = run(list("aé🙂".encode()))
    assert [delta.text for delta in deltas] == ["a", "", "é", "", "", "", "🙂"]


def test_broken_utf8_holds_nothing_back():
    stream = TextStream(TOKENIZER)
    texts = [stream.push([0xFF], final=False).text for _ in range(3)]
    assert texts == ["\ufffd", "\ufffd", "\ufffd"]


def test_an_incomplete_character_is_shown_at_the_end():
    deltas, _ = run([*b"ab", 0xF0, 0x9F])
    assert text_of(deltas) == "ab\ufffd"


stops = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(text=st.text("abc", max_size=30), stop=stops, pieces=st.lists(st.integers(1, 5), max_size=30))
@pytest.mark.parametrize("include_stop", [False, True])
def test_text_ends_before_the_first_stop_string(text, stop, pieces, include_stop):
    deltas, stream = run(list(text.encode()), pieces=pieces, stop=stop, include_stop=include_stop)
    ends = [(i, s) for i in range(len(text) + 1) for s in stop if text[:i].endswith(s)]
    if not ends:
        assert text_of(deltas) == text
        assert all(delta.stop_string is None for delta in deltas)
        return
    end = ends[0][0]
    found = max((s for i, s in ends if i == end), key=len)
    assert text_of(deltas) == (text[:end] if include_stop else text[: end - len(found)])
    assert [delta.stop_string for delta in deltas if delta.stop_string] == [found]
    assert stream.num_consumed_tokens == end


@given(
    text=st.text("abc", max_size=30),
    stop=stops,
    pieces=st.lists(st.integers(1, 5), max_size=30),
    min_tokens=st.integers(0, 12),
)
def test_no_stop_string_ends_the_text_within_the_first_tokens(text, stop, pieces, min_tokens):
    deltas, stream = run(list(text.encode()), pieces=pieces, stop=stop, min_tokens=min_tokens)
    ends = [(i, s) for i in range(min_tokens + 1, len(text) + 1) for s in stop if text[:i].endswith(s)]
    if not ends:
        assert text_of(deltas) == text
        assert stream.num_consumed_tokens == len(text)
        return
    end = ends[0][0]
    found = max((s for i, s in ends if i == end), key=len)
    assert text_of(deltas) == text[: end - len(found)]
    assert stream.num_consumed_tokens == end


def test_a_stop_string_may_begin_within_the_first_tokens():
    deltas, _ = run(list(b"xENDy"), stop=["END"], min_tokens=3)
    assert text_of(deltas) == "x"
    deltas, _ = run(list(b"xENDyEND"), stop=["END"], min_tokens=4)
    assert text_of(deltas) == "xENDy"


def test_special_tokens_count_as_first_tokens():
    deltas, _ = run([THINK, THINK, *b"xEND"], stop=["END"], min_tokens=5)
    assert text_of(deltas) == "x"


def test_a_possible_stop_string_is_held_until_it_is_none():
    deltas, _ = run(list(b"xENy"), stop=["END"])
    assert [delta.text for delta in deltas] == ["x", "", "", "ENy"]


def test_held_text_is_given_at_the_end():
    deltas, _ = run(list(b"xEN"), stop=["END"])
    assert text_of(deltas) == "xEN"


def test_nothing_follows_a_stop_string():
    deltas, stream = run(list(b"aEND more"), stop=["END"], pieces=[9])
    assert text_of(deltas) == "a"
    assert stream.num_consumed_tokens == 4
    assert stream.push(list(b"more"), final=True).text == ""


def test_offsets_say_where_each_token_begins():
    deltas, _ = run(list("aé!".encode()), pieces=[2, 2])
    assert [delta.token_offsets for delta in deltas] == [[0, 1], [1, 2]]


def test_special_tokens_are_left_out_unless_wanted():
    ids = [*b"a", THINK, *b"b", EOS]
    assert text_of(run(ids)[0]) == "ab"
    assert text_of(run(ids, skip_special_tokens=False)[0]) == "a<think>b<eos>"
