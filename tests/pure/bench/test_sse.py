from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.bench.stream import EventStreamParser

STREAM = (
    b": a comment\n\n"
    b'data: {"a": "1\xe2\x82\xac"}\n\n'
    b"event: message\nid: 7\ndata:no space\n\n"
    b"data: first\ndata: second\n\n"
    b"\n\n"
    b"data:  two blanks\n\n"
    b"data:\n\n"
    b"data: [DONE]\n\n"
)
EVENTS = ['{"a": "1\u20ac"}'.encode(), b"no space", b"first\nsecond", b" two blanks", b"", b"[DONE]"]


def parse(pieces: list[bytes]) -> list[bytes]:
    parser = EventStreamParser()
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


@given(st.sets(st.integers(1, len(STREAM) - 1)), st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_any_chunking_and_line_end_gives_the_same_events(cuts: set[int], line_end: bytes) -> None:
    stream = STREAM.replace(b"\n", line_end)
    bounds = [0, *sorted(cuts), len(stream)]

    assert parse([stream[a:b] for a, b in pairwise(bounds)]) == EVENTS


def test_one_byte_at_a_time() -> None:
    assert parse([bytes([byte]) for byte in STREAM]) == EVENTS


def test_events_come_out_with_the_piece_that_completes_them() -> None:
    parser = EventStreamParser()

    assert parser.feed(b"data: a\n") == []
    assert parser.feed(b"\ndata: b\n\nda") == [b"a", b"b"]
    assert parser.feed(b"ta: c\n\n") == [b"c"]


@pytest.mark.parametrize("tail", [b"data: [DONE]", b"data: [DONE]\n", b"data: [DONE]\r\n"])
def test_a_last_event_without_its_blank_line_counts(tail: bytes) -> None:
    assert parse([b"data: x\n\n" + tail]) == [b"x", b"[DONE]"]
