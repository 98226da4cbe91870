"""One streamed answer, from raw bytes to delivery times."""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from onbeat.bench.payload import choice_text
from onbeat.bench.record import ServerVerdict


class EventStreamParser:
    """Turns pieces of an event stream into the data of its events.

    Lines may end in LF, CR or CRLF and may be split anywhere between pieces. Comments and the fields
    `event`, `id` and `retry` carry nothing that a load client needs and are passed over.
    """

    __slots__ = ("_data", "_rest")

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

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
            elif not line and self._data:
                events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
                self._data = []
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
        for data in self._parser.feed(piece):
            self._take(data, now)

    def finish(self, now: float) -> None:
        """Note the end of the stream.

        Raises
        ------
        StreamError : neither a finish reason nor `[DONE]` came, or no text did.
        """
        for data in self._parser.finish():
            self._take(data, now)
        if not self._is_done and self.finish_reason is None:
            seen = len(self.delivery_times)
            raise StreamError(
                "broken stream", f"the stream ended after {seen} chunks without a finish reason"
            )
        if not self.delivery_times:
            raise StreamError("no text", f"the answer has no text (finish reason: {self.finish_reason})")

    def _take(self, data: bytes, now: float) -> None:
        if data.strip() == b"[DONE]":
            self._is_done = True
            return
        try:
            message = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise StreamError("malformed chunk", f"not JSON: {data[:120]!r}") from error
        if not isinstance(message, dict):
            raise StreamError("malformed chunk", f"not a JSON object: {data[:120]!r}")
        if message.get("error"):
            raise StreamError("error in stream", error_text(message), code=error_code(message))
        if message.get("usage"):
            self.usage = message["usage"]
        if isinstance(message.get("slo"), dict):
            self.verdict = ServerVerdict.parse(message["slo"])
        text = ""
        for choice in message.get("choices") or ():
            text += choice_text(choice)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.delivery_times.append(now)
            self.texts.append(text)


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
