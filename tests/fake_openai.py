"""A small OpenAI-compatible server with faults on request, for tests of load clients.

A prompt's behaviour is set per server; tokens are words, one a chunk.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class FakeOpenAI:
    """Behaviour and observations of the fake.

    Parameters
    ----------
    first_token_delay, token_delay : seconds.
    num_slots : requests served at once; others wait.
    fail_every : every n-th request (1-based) gets `fault`; 0 never.
    fault : `status:500`, `status:429`, `cut` (connection broken in mid-stream), `end` (stream ends without a
        finish reason), `error` (error event in the stream), `odd` (a chunk that is no OpenAI chunk), `hang`
        (never answers), `empty` (no text).
    message : of `status:` faults.
    text_field : of /tokenize; where a body has another one there are no tokens, as llama.cpp answers.
    fault_code : the code of `status:` and `error` faults; None sends the status, as some servers do.
    predicted_ttft_ms : of refusals, with a Retry-After of 1.5 s; None leaves both out.
    verdict : the object `slo` of the last chunk; None leaves it out.
    owned_by : of the model; None leaves it out.
    details : the object `completion_tokens_details` of the usage; None leaves it out.
    metrics : what /metrics shows, the next text at each look; empty has no such path.
    """

    first_token_delay: float = 0.0
    token_delay: float = 0.0
    num_slots: int = 1000
    fail_every: int = 0
    fault: str = "status:500"
    message: str | None = None
    text_field: str = "prompt"
    fault_code: str | None = None
    predicted_ttft_ms: float | None = None
    verdict: dict[str, Any] | None = None
    owned_by: str | None = None
    details: dict[str, int] | None = None
    metrics: list[str] = field(default_factory=list)
    sends_usage: bool = True
    has_tokenize: bool = True
    tokens_per_chunk: int = 1
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_open: int = 0
    peak_open: int = 0
    connections: set[object] = field(default_factory=set)
    num_completions: int = 0

    def app(self) -> web.Application:
        self.slots = asyncio.Semaphore(self.num_slots)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/completions", self.handle)
        app.router.add_post("/v1/chat/completions", self.handle)
        app.router.add_post("/v1/embeddings", self.handle)
        app.router.add_get("/v1/models", self.models)
        if self.metrics:
            app.router.add_get("/metrics", self.show_metrics)
        if self.has_tokenize:
            app.router.add_post("/tokenize", self.tokenize)
        return app

    async def models(self, request: web.Request) -> web.Response:
        owner = {} if self.owned_by is None else {"owned_by": self.owned_by}
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"} | owner]})

    async def show_metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics.pop(0))

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.text_field not in body:
            return web.json_response({"tokens": []})
        tokens = [1, *range(2, 2 + len(body[self.text_field].split()))]  # one special token, one a word
        return web.json_response({"count": len(tokens), "tokens": tokens, "max_model_len": 4096})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.connections.add(request.transport)
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        self.num_completions += 1
        is_faulty = bool(self.fail_every) and self.num_completions % self.fail_every == 0
        fault = self.fault if is_faulty else ""
        self.num_open += 1
        self.peak_open = max(self.peak_open, self.num_open)
        try:
            async with self.slots:
                return await self.answer(request, body, fault)
        finally:
            self.num_open -= 1

    async def answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        if fault.startswith("status:"):
            return self.refuse(int(fault.removeprefix("status:")))
        if fault == "hang":
            await asyncio.sleep(3600)
        if "input" in body:
            return await self.embed(body, fault)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        is_chat = "messages" in body
        if is_chat:
            await self.event(
                response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
            )
        await asyncio.sleep(self.first_token_delay)
        num_tokens = 0 if fault == "empty" else body["max_tokens"]
        for position in range(0, num_tokens, self.tokens_per_chunk):
            if position:
                await asyncio.sleep(self.token_delay)
            if fault in {"cut", "end", "error", "odd"} and position >= num_tokens // 2:
                return await self.break_off(request, response, fault)
            text = " word" * min(self.tokens_per_chunk, num_tokens - position)
            choice = {"index": 0, "delta": {"content": text}} if is_chat else {"index": 0, "text": text}
            await self.event(response, {"choices": [choice | {"finish_reason": None}]})
        last = {"index": 0, "delta": {}} if is_chat else {"index": 0, "text": ""}
        verdict = {} if self.verdict is None else {"slo": self.verdict}
        await self.event(response, {"choices": [last | {"finish_reason": "length"}]} | verdict)
        if self.sends_usage:
            usage: dict[str, Any] = {"prompt_tokens": self.count(body), "completion_tokens": num_tokens}
            if self.details is not None:
                usage["completion_tokens_details"] = self.details
            await self.event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def embed(self, body: dict[str, Any], fault: str) -> web.Response:
        await asyncio.sleep(self.first_token_delay)
        data = [] if fault == "empty" else [{"index": 0, "object": "embedding", "embedding": [0.6, 0.8]}]
        num_tokens = 1 + len(body["input"].split())
        verdict = {} if self.verdict is None else {"slo": self.verdict}
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return web.json_response({"object": "list", "data": data, "usage": usage} | verdict)

    def refuse(self, status: int) -> web.Response:
        error: dict[str, Any] = {
            "message": self.message or f"fault {status}",
            "code": self.fault_code or status,
        }
        headers = {}
        if self.predicted_ttft_ms is not None:
            error["predicted_ttft_ms"] = self.predicted_ttft_ms
            headers = {"Retry-After": "2", "retry-after-ms": "1500"}
        return web.json_response({"error": error}, status=status, headers=headers)

    async def break_off(
        self, request: web.Request, response: web.StreamResponse, fault: str
    ) -> web.StreamResponse:
        if fault == "cut":
            assert request.transport is not None
            request.transport.abort()
        elif fault == "error":
            error = {"message": "the engine failed", "type": "server_error", "code": self.fault_code}
            await self.event(response, {"error": error})
        elif fault == "odd":
            await self.event(response, {"choices": [None]})
        if fault != "cut":
            await response.write_eof()
        return response

    @staticmethod
    def count(body: dict[str, Any]) -> int:
        prompt = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return 1 + len(prompt.split())

    @staticmethod
    async def event(response: web.StreamResponse, message: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")


@asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[str]:
    """Serve the fake on a free port of the loopback; yields its base URL."""
    runner = web.AppRunner(fake.app(), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()
