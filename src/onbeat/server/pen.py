"""How answers are written: one pen for each API makes Structs, and knows no bytes; here they become JSON.

What may be long is written as it comes, so that no work is left for the end of a long answer but to send it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from msgspec import UNSET, Struct, UnsetType

from onbeat.server.answer_report import AnswerTokens, SLOReport, Usage
from onbeat.server.choices import Choice, ChoiceDelta, ShownToken
from onbeat.server.errors import ErrorReply
from onbeat.server.pieces import encode, json_inside, written
from onbeat.text.reply.calls import CallEnd, CallStart, CallText, ContentText, ReasoningText, ReplyEvent
from onbeat.version import __version__

DONE = b"data: [DONE]\n\n"


class Head(Struct):
    """What an answer of completions begins with, whole or in each event."""

    id: str
    object: str
    created: int
    """Unix time, seconds."""
    model: str
    system_fingerprint: str = f"onbeat-{__version__}"


class AnswerHead(NamedTuple):
    """The id of an answer, when it was begun (Unix time, seconds), and whose it is."""

    completion_id: str
    created: int
    model: str

    def fields(self, kind: str) -> tuple[str, str, int, str]:
        """Return the first fields of a `Head` of one kind."""
        return self.completion_id, kind, self.created, self.model


def new_head(prefix: str, model: str, *, joint: str = "-") -> AnswerHead:
    """Return the head of a new answer with an id of its own, which begins with a prefix and a joint."""
    return AnswerHead(f"{prefix}{joint}{uuid.uuid4().hex}", int(time.time()), model)


class Extras(NamedTuple):
    """What goes beside the choices of an event or of a whole answer."""

    counts: AnswerTokens | None = None
    usage: Usage | UnsetType | None = UNSET
    """Tokens so far, as completions tell them; None (null) and unset by what the caller has asked for."""
    slo: SLOReport | UnsetType = UNSET
    """How the objectives were kept; at the end alone, and only if there were any."""


@dataclass(slots=True)
class Part:
    """A run of reasoning or of content in an answer, or a call of a tool."""

    kind: Literal["reasoning", "content", "call"]
    text: bytearray
    """Inside of its JSON string; a call's is that of its arguments."""
    call: CallStart | None = None

    @property
    def json(self) -> Any:
        """The text, as a value of a Struct."""
        return written(b'"', self.text, b'"')

    @property
    def known_call(self) -> CallStart:
        assert self.call is not None, "calls have one"
        return self.call


class WholeChoice:
    """A choice of an answer, written as it comes.

    Parameters
    ----------
    choice : which one.
    num_columns : of `Pen.columns`.

    Attributes
    ----------
    text : inside of its JSON string, where its deltas have no events.
    columns : inside of the JSON arrays that tell of its tokens' log-probabilities.
    finish_reason : as in `ChoiceDelta`.
    """

    def __init__(self, choice: Choice, num_columns: int) -> None:
        self.choice = choice
        self.text = bytearray()
        self.columns = [bytearray() for _ in range(num_columns)]
        self.finish_reason: str | None = None
        self._parts: list[Part] = []

    @property
    def parts(self) -> list[Part]:
        """What the answer is made of, in its order; text that nothing tells apart is content."""
        return self._parts or ([Part("content", self.text)] if self.text else [])

    def add(self, delta: ChoiceDelta, columns: Sequence[bytes]) -> None:
        """Take a delta, and its own columns."""
        if delta.events is None:
            self.text += json_inside(delta.text)
        for each in delta.events or ():
            self.add_event(each)
        self.add_columns(delta, columns)

    def add_columns(self, delta: ChoiceDelta, columns: Sequence[bytes]) -> None:
        """Take what a delta holds beside its text."""
        self.finish_reason = delta.finish_reason
        if delta.tokens:
            for own, new in zip(self.columns, columns, strict=True):
                if own:
                    own += b","
                own += new

    def add_event(self, event: ReplyEvent) -> str:
        """Take what a part of the answer adds, and return its text."""
        match event:
            case CallStart():
                self._parts.append(Part("call", bytearray(), event))
                return ""
            case CallText(text=text):
                part = self._parts[-1]
            case ReasoningText(text=text):
                part = self._text_part("reasoning")
            case ContentText(text=text):
                part = self._text_part("content")
            case CallEnd():
                return ""
        part.text += json_inside(text)
        return text

    def _text_part(self, kind: Literal["reasoning", "content"]) -> Part:
        """Return the last part if it is of a kind, else a new one."""
        if not self._parts or self._parts[-1].kind != kind:
            self._parts.append(Part(kind, bytearray()))
        return self._parts[-1]


class Pen(Protocol):
    """How one API writes an answer: text (`ChoiceDelta.text`), or the parts of it (`events`)."""

    end_mark: bytes
    """The last bytes of a stream; empty where the API has none."""

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        """Return the inside of the JSON arrays that tell of tokens' log-probabilities; none if not asked.

        Those of more tokens are joined by commas.
        """

    def events(self, delta: ChoiceDelta, extras: Extras) -> Iterable[Struct]:
        """Return the events of one delta. One with a field `type` has that for its name."""

    def end(self, extras: Extras) -> Iterable[Struct]:
        """Return the events behind those of all deltas.

        Parameters
        ----------
        extras : of the whole answer.
        """

    def failed(self, reply: ErrorReply) -> Iterable[Struct]:
        """Return the last events of a stream that an error ends."""

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Struct:
        """Return the whole answer; what may be long in it is a `Long` value, no piece of which takes long."""


def event_bytes(events: Iterable[Struct]) -> bytes:
    """Return server-sent events."""
    out = bytearray()
    for event in events:
        if (kind := getattr(event, "type", None)) is not None:
            out += b"event: %b\n" % kind.encode()
        out += b"data: %b\n\n" % encode(event)
    return bytes(out)


class PartPen(Protocol):
    """How an API that tells an answer part by part writes these."""

    def part_begins(self, index: int, part: Part) -> Iterable[Struct]:
        """Return what tells that a part begins."""

    def part_grows(self, index: int, part: Part, text: str, columns: Sequence[bytes]) -> Struct:
        """Return what tells that a part grows; the columns of its delta go with the delta's first text."""

    def part_ends(self, index: int, part: Part, *, is_whole: bool) -> Iterable[Struct]:
        """Return what tells that a part ends; it is not whole where the answer was cut off in it."""


class StreamedParts:
    """Tells the parts of one streamed choice one after another.

    Parameters
    ----------
    choice : which one.
    num_columns : of `Pen.columns`.
    pen : of the API.

    Attributes
    ----------
    whole : the choice as far as it has come.
    """

    def __init__(self, choice: Choice, num_columns: int, pen: PartPen) -> None:
        self.whole = WholeChoice(choice, num_columns)
        self._pen = pen
        self._num_begun = 0

    def take(self, delta: ChoiceDelta, columns: Sequence[bytes]) -> Iterator[Struct]:
        """Yield the events of a delta."""
        unsent = columns
        for event in delta.all_events:
            text = self.whole.add_event(event)
            if len(self.whole.parts) > self._num_begun:
                yield from self._end(is_whole=True)
                yield from self._begin()
            if text:
                yield self._pen.part_grows(self._num_begun - 1, self.whole.parts[-1], text, unsent)
                unsent = ()
        self.whole.add_columns(delta, columns)
        if delta.finish_reason is not None:
            if not self.whole.parts:  # an empty answer is an empty text
                self.whole.add_event(ContentText(""))
                yield from self._begin()
            yield from self._end(is_whole=delta.finish_reason != "length")

    def _begin(self) -> Iterable[Struct]:
        self._num_begun += 1
        return self._pen.part_begins(self._num_begun - 1, self.whole.parts[-1])

    def _end(self, *, is_whole: bool) -> Iterable[Struct]:
        if not self._num_begun:
            return ()
        index = self._num_begun - 1
        return self._pen.part_ends(index, self.whole.parts[index], is_whole=is_whole)
