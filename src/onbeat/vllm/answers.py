"""What vLLM's answers say: deliveries, ends and refusals in the events of a stream, or in a whole body."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from onbeat.vllm.refusals import Refusal, refusal_in
from onbeat.vllm.requests import MESSAGES, RESPONSES

DONE = b"[DONE]"


@dataclass(slots=True)
class Told:
    """What one event, or a whole answer, says."""

    deliveries: list[int] = field(default_factory=list)
    """Choices that got tokens, by index."""
    finished: dict[int, str] = field(default_factory=dict)
    """Choice -> its finish reason, in OpenAI's words."""
    refusal: Refusal | None = None
    is_error: bool = False
    has_begun: bool = False
    """Whether the answer has begun, so that it is no refusal any more."""
    takes_verdict: bool = False
    """Whether the verdict may be added to it, if nothing follows that takes it better."""
    is_end: bool = False
    """Whether it ends the answer, so that nothing follows that takes the verdict."""
    usage: Mapping[str, Any] | None = None


NOTHING = Told()


class EventSplitter:
    """Cuts a stream of server-sent events into events, however it is cut into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now, each with the empty line that ends it."""
        start = max(len(self._rest) - 3, 0)
        self._rest += data
        events: list[bytes] = []
        begin = 0
        while (end := _event_end(self._rest, max(start, begin))) > 0:
            events.append(bytes(self._rest[begin:end]))
            begin = start = end
        del self._rest[:begin]
        return events

    def rest(self) -> bytes:
        """Return what is left behind the last whole event."""
        rest, self._rest = bytes(self._rest), bytearray()
        return rest


def _event_end(data: bytearray, start: int) -> int:
    """Return where an event ends that begins at or before `start`; 0 if none does."""
    plain, with_returns = data.find(b"\n\n", start), data.find(b"\r\n\r\n", start)
    ends = [at + size for at, size in ((plain, 2), (with_returns, 4)) if at >= 0]
    return min(ends, default=0)


def data_of(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    return b"\n".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))


def with_verdict(event: bytes, verdict: Mapping[str, Any], path: str) -> bytes:
    """Return an event with the object `slo` in it."""
    lines = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    data = orjson.dumps(_put(orjson.loads(data_of(event)), verdict, path))
    return b"\n".join([*lines, b"data: " + data]) + b"\n\n"


def whole_with_verdict(body: Mapping[str, Any], verdict: Mapping[str, Any]) -> bytes:
    """Return a whole answer with the object `slo` in it."""
    return orjson.dumps({**body, "slo": verdict})


def _put(data: dict[str, Any], verdict: Mapping[str, Any], path: str) -> dict[str, Any]:
    if path == RESPONSES and isinstance(data.get("response"), dict):
        data["response"]["slo"] = verdict
    else:
        data["slo"] = verdict
    return data


def read_event(path: str, data: bytes) -> Told:
    """Return what the data of an event says; what is no JSON object is some part of an answer."""
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError:
        return Told(has_begun=True)
    if not isinstance(content, dict):
        return Told(has_begun=True)
    if content.get("error") or content.get("type") == "error":
        return _error(content)
    return _EVENTS.get(path, _openai_event)(content)


def read_whole(path: str, body: Mapping[str, Any]) -> Told:
    """Return what a whole answer says, errors included."""
    if body.get("error") or body.get("type") == "error":
        return _error(body)
    told = Told(usage=_mapping(body, "usage"), takes_verdict=True, has_begun=True)
    if path == RESPONSES:
        told.finished[0] = _RESPONSE_ENDS.get(str(body.get("status")), "")
        if not told.finished[0]:
            told.finished, told.takes_verdict = {}, False  # it goes on in the background
        told.has_begun = bool(body.get("output")) or not told.finished
    elif path == MESSAGES:
        told.finished[0] = _anthropic_end(body.get("stop_reason"))
    else:
        _take_choices(told, body, delta=None)
    return told


def _error(content: Mapping[str, Any]) -> Told:
    error = content.get("error", content)
    message = error.get("message") if isinstance(error, dict) else error
    return Told(is_error=True, refusal=refusal_in(message))


def _openai_event(content: dict[str, Any]) -> Told:
    told = Told(usage=_mapping(content, "usage"), takes_verdict=not content.get("choices"))
    _take_choices(told, content, delta="delta")
    return told


def _take_choices(told: Told, content: Mapping[str, Any], *, delta: str | None) -> None:
    choices = content.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        if not isinstance(choice, dict):
            continue
        index, end = choice.get("index"), choice.get("finish_reason")
        index = index if isinstance(index, int) else 0
        if end == "abort" and (refusal := refusal_in(choice.get("stop_reason"))) is not None:
            told.refusal = refusal
        if end is not None:
            told.finished[index] = str(end)
            told.takes_verdict = told.has_begun = True
        news = choice.get(delta) if delta is not None else None
        # the first event of a chat names the role, before there is any token
        if not isinstance(news, dict) or news.keys() - {"role", "content"} or "role" not in news:
            told.deliveries.append(index)
            told.has_begun = True
        elif news.get("content"):
            told.has_begun = True


def _anthropic_event(content: dict[str, Any]) -> Told:
    match content.get("type"):
        case "content_block_delta":
            return Told(deliveries=[0], has_begun=True)
        case "message_delta":
            delta = _mapping(content, "delta") or {}
            return Told(
                finished={0: _anthropic_end(delta.get("stop_reason"))},
                takes_verdict=True,
                is_end=True,
                has_begun=True,
                usage=_mapping(content, "usage"),
            )
    return NOTHING


def _anthropic_end(reason: object) -> str:
    """Return a stop reason in OpenAI's words; vLLM has none for what was aborted."""
    return "abort" if reason is None else "length" if reason == "max_tokens" else "stop"


_RESPONSE_ENDS = {"completed": "stop", "incomplete": "length", "cancelled": "abort", "failed": "error"}


def _responses_event(content: dict[str, Any]) -> Told:
    kind = str(content.get("type"))
    if kind.endswith(".delta"):
        return Told(deliveries=[0], has_begun=True)
    status = kind.removeprefix("response.")
    if status not in _RESPONSE_ENDS:
        return NOTHING
    response = _mapping(content, "response") or {}
    error = _mapping(response, "error") or {}
    return Told(
        finished={0: _RESPONSE_ENDS.get(str(response.get("status")), _RESPONSE_ENDS[status])},
        refusal=refusal_in(error.get("message")),
        takes_verdict=True,
        is_end=True,
        has_begun=True,
        is_error=status == "failed",
        usage=_mapping(response, "usage"),
    )


def _mapping(content: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = content.get(name)
    return value if isinstance(value, dict) else None


_EVENTS: Mapping[str, Callable[[dict[str, Any]], Told]] = {
    MESSAGES: _anthropic_event,
    RESPONSES: _responses_event,
}
