"""Streams that tell an answer part by part: what the Responses API and Anthropic's have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from onbeat.server.answer_format import WholeChoice, WholePart
from onbeat.server.choices import Choice, ChoiceDelta
from onbeat.text.reply.events import ContentText


def named_event(kind: str, value: dict[str, Any]) -> bytes:
    """Return an event that has its kind as its name and in its data."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **value}))


class PartWriter(Protocol):
    """Writes the events of the parts of an answer, as an API has them."""

    def part_begins(self, index: int, part: WholePart) -> bytes:
        """Return what tells that a part begins."""
        ...

    def part_grows(self, index: int, part: WholePart, text: str, columns: Sequence[bytes]) -> bytes:
        """Return what tells that a part grows; the columns of its delta go with the delta's first text."""
        ...

    def part_ends(self, index: int, part: WholePart, *, is_whole: bool) -> bytes:
        """Return what tells that a part ends; it is not whole where the answer was cut off in it."""
        ...


class StreamedParts:
    """Tells the parts of one streamed choice one after another.

    Parameters
    ----------
    choice : which one.
    num_columns : of `AnswerFormat.columns`.
    writer : of the API.

    Attributes
    ----------
    whole : the choice as far as it has come.
    """

    def __init__(self, choice: Choice, num_columns: int, writer: PartWriter) -> None:
        self.whole = WholeChoice(choice, num_columns)
        self._writer = writer
        self._num_begun = 0

    def take(self, delta: ChoiceDelta, columns: Sequence[bytes]) -> bytes:
        """Return the events of a delta."""
        out, unsent = bytearray(), columns
        for event in delta.all_events:
            text = self.whole.add_event(event)
            if len(self.whole.parts) > self._num_begun:
                out += self._end(is_whole=True) + self._begin()
            if text:
                out += self._writer.part_grows(self._num_begun - 1, self.whole.parts[-1], text, unsent)
                unsent = ()
        self.whole.add_columns(delta, columns)
        if delta.finish_reason is not None:
            if not self.whole.parts:  # an empty answer is an empty text
                self.whole.add_event(ContentText(""))
                out += self._begin()
            out += self._end(is_whole=delta.finish_reason != "length")
        return bytes(out)

    def _begin(self) -> bytes:
        self._num_begun += 1
        return self._writer.part_begins(self._num_begun - 1, self.whole.parts[-1])

    def _end(self, *, is_whole: bool) -> bytes:
        if not self._num_begun:
            return b""
        index = self._num_begun - 1
        return self._writer.part_ends(index, self.whole.parts[index], is_whole=is_whole)
