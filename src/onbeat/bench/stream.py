"""One streamed answer, from raw bytes to delivery times."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import orjson

from onbeat.bench.record import ServerVerdict, choice_text

FAILURES = frozenset({"abort", "error"})
"""Finish reasons of an answer that the server gave up, as vLLM and SGLang name them."""


class EventStreamParser:
    """Turns pieces of an event stream into the data of its events.

    Lines may end in LF, CR or CRLF and may be split anywhere between pieces. Comments and the fields `id` and
    `retry` carry nothing that a load client needs and are passed over, and so is `event`, unless it is
    `error`: the stream has failed then, whatever the data looks like. A field `error` (llama.cpp's, before it
    sent errors as data) says the same.

    Attributes
    ----------
    error : what the first event of that kind says; None as long as there was none.
    """

    __slots__ = ("_data", "_is_error", "_rest", "error")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._is_error = False
        self.error: bytes | None = None

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that this piece completes, in order."""
        if self._rest:
            piece = self._rest + piece
        if b"\r" in piece:
            piece = self._normalise(piece)
        lines = piece.split(b"\n")
        self._rest = lines.pop()
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and (self._data or self._is_error):
                data = self._data[0] if len(self._data) == 1 else b"\n".join(self._data)
                if not self._is_error:
                    events.append(data)
                elif self.error is None:
                    self.error = data
                self._data, self._is_error = [], False
            elif line.startswith(b"error:"):
                self._is_error = True
                self._data.append(line[6:].strip())
            elif line.startswith(b"event:") and line[6:].strip() == b"error":
                self._is_error = True
        return events

    @staticmethod
    def _normalise(piece: bytes) -> bytes:
        # A final CR may be the first half of a CRLF: leave it until the next piece shows.
        held = b"\r" if piece.endswith(b"\r") else b""
        body = piece[:-1] if held else piece
        return body.replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held

    def finish(self) -> list[bytes]:
        """Return the data of a last event that lacks its closing blank line.

        The standard drops such an event; a server that forgets the blank line after `[DONE]` has still
        delivered its answer.
        """
        events = self.feed(b"\n\n")
        self._rest = b""
        return events


class StreamError(Exception):
    """The stream is not the whole answer.

    Parameters
    ----------
    cause : short label under which failures are counted.
    detail : what exactly was seen.
    code : the error code of an API's error body.
    """

    def __init__(self, cause: str, detail: str, *, code: str | None = None) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.code = code


class AnswerStream:
    """Collects the deliveries of one answer.

    A delivery is an event with text. Role chunks, usage chunks and empty deltas are none, so the numbers do
    not depend on how chatty a server's framing is.
    """

    __slots__ = ("_is_done", "_parser", "delivery_times", "finish_reason", "texts", "usage", "verdict")

    def __init__(self) -> None:
        self._parser = EventStreamParser()
        self._is_done = False
        self.delivery_times = array("d")
        self.texts: list[str] = []
        self.usage: dict[str, Any] | None = None
        self.finish_reason: str | None = None
        self.verdict: ServerVerdict | None = None

    def feed(self, piece: bytes, now: float) -> None:
        """Take bytes that arrived at `now` (seconds).

        Raises
        ------
        StreamError : an error event, or data that is not JSON.
        """
        self._take_all(self._parser.feed(piece), now)

    def finish(self, now: float) -> None:
        """Note the end of the stream.

        Raises
        ------
        StreamError : neither a finish reason nor `[DONE]` came, or no text did, or the server says that it
            gave up.
        """
        self._take_all(self._parser.finish(), now)
        if not self._is_done and self.finish_reason is None:
            seen = len(self.delivery_times)
            raise StreamError(
                "broken stream", f"the stream ended after {seen} chunks without a finish reason"
            )
        if self.finish_reason in FAILURES:
            seen = len(self.delivery_times)
            raise StreamError(
                "ended by the server", f"finish reason {self.finish_reason!r} after {seen} chunks"
            )
        if not self.delivery_times:
            raise StreamError("no text", f"the answer has no text (finish reason: {self.finish_reason})")

    def take_embeddings(self, data: bytes, now: float) -> None:
        """Take the whole answer of an endpoint that embeds texts, the one delivery.

        Raises
        ------
        StreamError : it is none.
        """
        found = self._read(data).get("data")
        if not (isinstance(found, list) and found and all(isinstance(each, dict) for each in found)):
            raise StreamError("no embedding", f"the answer has no list of embeddings: {data[:120]!r}")
        if not all(each.get("embedding") for each in found):
            raise StreamError("no embedding", f"an embedding is missing: {data[:120]!r}")
        self.delivery_times.append(now)

    def _take_all(self, events: list[bytes], now: float) -> None:
        for data in events:
            self._take(data, now)
        if (error := self._parser.error) is not None:
            raise _event_error(error)

    def _take(self, data: bytes, now: float) -> None:
        if data.strip() == b"[DONE]":
            self._is_done = True
            return
        message = self._read(data)
        try:
            text = self._take_choices(message.get("choices") or ())
        except (AttributeError, TypeError) as error:
            raise StreamError("malformed chunk", f"not an OpenAI chunk: {data[:120]!r}") from error
        if text:
            self.delivery_times.append(now)
            self.texts.append(text)

    def _read(self, data: bytes) -> dict[str, Any]:
        """Return the JSON object of an answer or a part of one, its usage and verdict taken."""
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise StreamError("malformed chunk", f"not JSON: {data[:120]!r}") from error
        if not isinstance(message, dict):
            raise StreamError("malformed chunk", f"not a JSON object: {data[:120]!r}")
        if message.get("error") or message.get("object") == "error":
            raise StreamError("error in stream", error_text(message), code=error_code(message))
        if isinstance(message.get("usage"), dict):
            self.usage = message["usage"] or self.usage
        if isinstance(message.get("slo"), dict):
            self.verdict = ServerVerdict.parse(message["slo"])
        return message

    def _take_choices(self, choices: Iterable[dict[str, Any]]) -> str:
        """Return the text of a chunk."""
        text = ""
        for choice in choices:
            text += choice_text(choice)
            if isinstance(reason := choice.get("finish_reason"), str):
                self.finish_reason = reason or self.finish_reason
        return text


def _event_error(data: bytes) -> StreamError:
    """Return what an event that is an error says: of an OpenAI error body its message, else the text."""
    try:
        message = orjson.loads(data)
    except orjson.JSONDecodeError:
        message = None
    if not isinstance(message, dict):
        return StreamError("error in stream", data.decode(errors="replace")[:300] or "an event without data")
    return StreamError("error in stream", error_text(message), code=error_code(message))


def error_text(message: dict[str, Any]) -> str:
    """Return the message of an OpenAI error body, or the body itself."""
    error = message.get("error", message)
    text = error.get("message") if isinstance(error, dict) else None
    return str(text or error)[:300]


def error_code(message: dict[str, Any]) -> str | None:
    """Return the code of an OpenAI error body; None if it has none, or a number as some servers send."""
    error = message.get("error")
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None
