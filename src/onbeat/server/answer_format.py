"""What the formats of both completion endpoints share: the head of an answer, server-sent events, extras.

Both write JSON as tokens come, so that no work is left for the end of a long answer but to send it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import orjson

from onbeat import __version__
from onbeat.server.choices import Choice, ChoiceDelta, ShownToken
from onbeat.server.errors import ErrorReply
from onbeat.server.pieces import Piece, json_inside
from onbeat.text.reply.events import CallEnd, CallStart, CallText, ContentText, ReasoningText, ReplyEvent

EVENT_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # nginx would collect events otherwise
    "x-accel-buffering": "no",
}

DONE = b"data: [DONE]\n\n"

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON lacks (OpenAI's value)."""

CACHED_TOKENS = 2**15
"""Tokens whose spelling is kept ready, of a server: the same ones come up as alternatives again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """What all chunks of an answer have in common."""

    completion_id: str
    created: int
    """Unix time, seconds."""
    model: str

    def fields(self, kind: str) -> dict[str, Any]:
        """Return the fields of an object of one kind."""
        return {
            "id": self.completion_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"onbeat-{__version__}",
        }


def new_head(prefix: str, model: str, *, joint: str = "-") -> AnswerHead:
    """Return the head of a new answer with an id of its own, which begins with a prefix and a joint."""
    return AnswerHead(
        completion_id=f"{prefix}{joint}{uuid.uuid4().hex}", created=int(time.time()), model=model
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What goes beside the choices of a chunk or of a whole answer."""

    usage: dict[str, Any] | None = None
    """Tokens so far; null is not sent where the caller did not ask for it."""
    slo: dict[str, Any] | None = None
    """How the objectives were kept; on the last chunk alone, and only if there were any."""
    prompt_token_ids: Sequence[int] | None = None
    """Of a chat, in a whole answer and in a choice's first chunk, if the caller asked for it."""

    def fields(self) -> dict[str, Any]:
        """Return the fields that are there."""
        ids = None if self.prompt_token_ids is None else list(self.prompt_token_ids)
        given = {"usage": self.usage, "slo": self.slo, "prompt_token_ids": ids}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(slots=True)
class WholePart:
    """A run of reasoning or of content in a whole answer, or a call of a tool."""

    kind: Literal["reasoning", "content", "call"]
    text: bytearray
    """Inside of its JSON string; a call's is that of its arguments."""
    call: CallStart | None = None


class WholeChoice:
    """A choice of a whole answer, written as it comes.

    Parameters
    ----------
    choice : which one.
    num_columns : of `AnswerFormat.columns`.

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
        self._parts: list[WholePart] = []

    @property
    def parts(self) -> list[WholePart]:
        """What the answer is made of, in its order; text that nothing tells apart is content."""
        return self._parts or ([WholePart("content", self.text)] if self.text else [])

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
                self._parts.append(WholePart("call", bytearray(), event))
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

    def _text_part(self, kind: Literal["reasoning", "content"]) -> WholePart:
        """Return the last part if it is of a kind, else a new one."""
        if not self._parts or self._parts[-1].kind != kind:
            self._parts.append(WholePart(kind, bytearray()))
        return self._parts[-1]


class AnswerFormat(Protocol):
    """How one endpoint writes its answers: text (`ChoiceDelta.text`), or the parts of it (`events`)."""

    def columns(self, tokens: Sequence[ShownToken]) -> Sequence[bytes]:
        """Return the inside of the JSON arrays that tell of tokens' log-probabilities; none if not asked.

        Those of more tokens are joined by commas.
        """
        ...

    def events(self, delta: ChoiceDelta, extras: Extras) -> bytes:
        """Return the events of one delta."""
        ...

    def end(self, extras: Extras) -> bytes:
        """Return the last bytes of a stream, behind the events of all deltas.

        Parameters
        ----------
        extras : of the whole answer.
        """
        ...

    def failed(self, reply: ErrorReply) -> bytes:
        """Return the last bytes of a stream that an error ends."""
        ...

    def whole(self, choices: Sequence[WholeChoice], extras: Extras) -> Iterator[Piece]:
        """Yield the whole answer in pieces, none of which takes long to make."""
        ...


def whole_answer(
    head: dict[str, Any], choices: Iterable[Iterator[Piece]], extras: Extras, tail: Iterable[Piece] = ()
) -> Iterator[Piece]:
    """Yield an object with all fields of a whole answer, given the pieces of each choice's JSON.

    Parameters
    ----------
    tail : more fields, each with a comma before it.
    """
    yield orjson.dumps(head | extras.fields())[:-1] + b',"choices":['
    for index, choice in enumerate(choices):
        if index:
            yield b","
        yield from choice
    yield b"]"
    yield from tail
    yield b"}"


def chunks_failed(reply: ErrorReply) -> bytes:
    """Return the last bytes of a stream of chunks that an error ends."""
    return b"data: " + reply.body + b"\n\n" + DONE


class ChunkTemplate:
    """The bytes around what changes from chunk to chunk of one stream.

    A stream has a chunk for each delivery, so chunks are joined from bytes, not built as objects.

    Parameters
    ----------
    head : the fields that are the same in all chunks, such as `id` and `model`.
    has_usage : whether each chunk carries a `usage` field, null but for the last.
    """

    def __init__(self, head: dict[str, Any], *, has_usage: bool) -> None:
        self._head = head
        self._start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":['
        self._has_usage = has_usage

    def end(self, extras: Extras) -> bytes:
        """Return the last bytes of a stream: an event with the usage and no choices, if it was asked for."""
        if not self._has_usage:
            return DONE
        return b"data: " + orjson.dumps({**self._head, "choices": [], **extras.fields()}) + b"\n\n" + DONE

    def chunk(self, choice: bytes, extras: Extras) -> bytes:
        """Return the event of one choice's JSON."""
        parts = [self._start, choice, b"]"]
        if extras.usage is not None:
            parts += (b',"usage":', orjson.dumps(extras.usage))
        elif self._has_usage:
            parts.append(b',"usage":null')
        if extras.slo is not None:
            parts += (b',"slo":', orjson.dumps(extras.slo))
        if extras.prompt_token_ids is not None:
            parts += (b',"prompt_token_ids":', orjson.dumps(extras.prompt_token_ids))
        parts.append(b"}\n\n")
        return b"".join(parts)


def choice_end(delta: ChoiceDelta | WholeChoice, finish_reason: str | None = None) -> bytes:
    """Return the last fields of a choice: why it ended, if it has, or in the endpoint's own word."""
    if delta.finish_reason is None:
        return b',"finish_reason":null}'
    reason = orjson.dumps(finish_reason or delta.finish_reason)
    stop = orjson.dumps(delta.choice.stop_reason)
    return b',"finish_reason":' + reason + b',"stop_reason":' + stop + b"}"
