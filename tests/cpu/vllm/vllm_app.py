"""An application that answers as vLLM's API server does: its shapes of bodies, events and errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import httpx
from prometheus_client import generate_latest

from onbeat.vllm.middleware import SLOMiddleware
from onbeat.vllm.telemetry import LATE, VAIN, Refusal

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BREAKS_OFF = b"breaks off"
"""In a stream: the application fails there."""
HEAD = {"id": "x-1", "created": 1, "model": "m"}
REFUSED = Refusal(code=LATE, predicted_ttft=1.25, retry_after=2.5).text()
EXPIRED = Refusal(code=VAIN).text()
ASK = {"model": "m", "messages": [], "slo": {"ttft_ms": 500, "tbt_ms": 50}}
USAGE = {"prompt_tokens": 7, "total_tokens": 9, "completion_tokens": 2}


class VLLMApp:
    """Answers each request with what `answer` makes of its body, and remembers what it was sent.

    A text is a whole answer with its status, a list the events of a stream. Events are sent in pieces as
    `cut` cuts their bytes.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], Any]) -> None:
        self.answer = answer
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data]

    async def __call__(self, scope, receive, send) -> None:
        assert scope["type"] == "http"
        self.headers.append({name.decode(): value.decode() for name, value in scope["headers"]})
        if scope["path"] == "/metrics":
            await _whole(send, 200, generate_latest(), b"text/plain")  # of the process, as vLLM does
            return
        raw, more = b"", True
        while more:
            message = await receive()
            raw += message["body"]
            more = message["more_body"]
        assert int(self.headers[-1]["content-length"]) == len(raw)
        try:
            body = json.loads(raw)
        except ValueError:
            await _whole(send, 400, b'{"error":{"message":"bad JSON"}}')
            return
        self.bodies.append(body)
        answer = self.answer(body)
        if isinstance(answer, tuple):
            await _whole(send, answer[0], json.dumps(answer[1]).encode())
            return
        await send(_start(200, b"text/event-stream; charset=utf-8"))
        for piece in self.cut(b"".join(each for each in answer if each != BREAKS_OFF)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        if BREAKS_OFF in answer:
            raise ValueError("the answer breaks off")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _start(status: int, kind: bytes, length: int | None = None) -> dict[str, Any]:
    headers = [(b"content-type", kind)]
    headers += [] if length is None else [(b"content-length", str(length).encode())]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _whole(send, status: int, body: bytes, kind: bytes = b"application/json") -> None:
    await send(_start(status, kind, len(body)))
    await send({"type": "http.response.body", "body": body, "more_body": False})


class BehindMiddleware(httpx.AsyncClient):
    """A client of an application behind our middleware, as `vllm serve` builds it.

    Attributes
    ----------
    served : what a server runs: with the state of vLLM's application.
    """

    def __init__(self, served, middleware: SLOMiddleware) -> None:
        super().__init__(transport=httpx.ASGITransport(served), base_url="http://vllm")
        self.served, self._middleware = served, middleware

    @property
    def shared(self):
        return self._middleware._shared


def client_of(app: Any, settings: dict[str, Any] | None = None, **args: Any) -> BehindMiddleware:
    """Return a client of an application whose server was started with these settings and arguments."""
    middleware = SLOMiddleware(app)
    config = SimpleNamespace(
        additional_config={"onbeat": settings or {}},
        model_config=SimpleNamespace(model="m"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    state = SimpleNamespace(vllm_config=config, args=SimpleNamespace(**args))

    async def with_state(scope, receive, send) -> None:
        scope["app"] = SimpleNamespace(state=state)
        await middleware(scope, receive, send)

    return BehindMiddleware(with_state, middleware)


def event(data: Any, name: str | None = None) -> bytes:
    head = f"event: {name}\n" if name else ""
    text = data if isinstance(data, str) else json.dumps(data)
    return f"{head}data: {text}\n\n".encode()


def chat_chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish, **more}
    return event({**HEAD, "object": "chat.completion.chunk", "choices": [choice]})


def chat_stream(*, usage: bool = False) -> list[bytes]:
    """Return a stream of two tokens, as chats have them."""
    return [
        chat_chunk({"role": "assistant", "content": ""}),
        chat_chunk({"content": "Hi"}),
        b": keep-alive\n\n",
        chat_chunk({"content": ""}, "stop", stop_reason=None),
        *([event({**HEAD, "choices": [], "usage": USAGE})] if usage else []),
        event("[DONE]"),
    ]


def chat_whole(finish: str = "stop", **more: Any) -> tuple[int, dict[str, Any]]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": finish, **more}
    return 200, {**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}


def completion_stream() -> list[bytes]:
    chunks = [
        {"index": 0, "text": text, "finish_reason": end} for text, end in (("a", None), ("b", "length"))
    ]
    return [*(event({**HEAD, "choices": [chunk]}) for chunk in chunks), event("[DONE]")]


def anthropic_stream() -> list[bytes]:
    start = {"id": "x", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 7}}
    return [
        event(dict(fields, type=kind), kind)
        for kind, fields in (
            ("message_start", {"message": start}),
            ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
            ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "Hi"}}),
            ("content_block_stop", {"index": 0}),
            ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}),
            ("message_stop", {}),
        )
    ]


def response_object(status: str, output: list[Any]) -> dict[str, Any]:
    usage = {"input_tokens": 7, "output_tokens": len(output)}
    return {"id": "resp_1", "object": "response", "status": status, "output": output, "usage": usage}


def responses_stream() -> list[bytes]:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "Hi"}]}]
    said: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": response_object("in_progress", [])}),
        ("response.in_progress", {"response": response_object("in_progress", [])}),
        ("response.output_text.delta", {"delta": "Hi"}),
        ("response.completed", {"response": response_object("completed", output)}),
    ]
    return [
        event({"type": kind, "sequence_number": number, **fields}, kind)
        for number, (kind, fields) in enumerate(said)
    ]


STREAMS: dict[str, Callable[[], list[bytes]]] = {
    CHAT: chat_stream,
    COMPLETIONS: completion_stream,
    MESSAGES: anthropic_stream,
    RESPONSES: responses_stream,
}


def data_events(content: bytes) -> list[Any]:
    """Return the JSON of the events of a stream, but for the last word."""
    lines = [line[6:] for line in content.splitlines() if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]
