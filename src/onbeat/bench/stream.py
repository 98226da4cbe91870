"""One streamed answer, from raw bytes to delivery times."""

from __future__ import annotations

from array import array
from typing import Any

import orjson

from onbeat.bench.payload import choice_text
from onbeat.bench.sse import EventStreamParser
from onbeat.bench.verdict import ServerVerdict


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
