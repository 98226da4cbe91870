"""A real server on a free port, in the test's own event loop."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
import orjson
import uvicorn
from fastapi import FastAPI
from openai.types.chat import ChatCompletionMessageParam

from onbeat.server.listening import bind
from onbeat.server.run import uvicorn_config
from onbeat.server.server_config import ServerConfig
from tests.cpu.server.fake_app import TEMPLATE, make_app
from tests.fakes_engine import ByteTokenizer, FakeEngine
from tests.waiting import until

REFUSAL_FIELDS = {"predicted_job_ms", "reason", "predicted_ttft_ms", "slo"}
"""What the error of a request has whose objectives cannot be kept."""

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@dataclass
class Served:
    """A running server and ways to talk to it."""

    url: str
    engine: FakeEngine
    app: FastAPI
    session: aiohttp.ClientSession
    _clients: list[openai.AsyncOpenAI] = field(default_factory=list)

    @property
    def client(self) -> openai.AsyncOpenAI:
        if not self._clients:
            self._clients.append(openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0))
        return self._clients[0]

    async def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        if body is not None:
            # as a stream: aiohttp warns of large bodies that are bytes
            options["data"] = io.BytesIO(json.dumps(body).encode())
            options["headers"] = {"content-type": "application/json", **options.get("headers", {})}
        async with self.session.post(self.url + path, **options) as response:
            return Answer(response.status, response.headers.copy(), await response.read())

    async def get(self, path: str, **options: Any) -> Answer:
        async with self.session.get(self.url + path, **options) as response:
            return Answer(response.status, response.headers.copy(), await response.read())

    async def events(self, path: str, body: Any) -> list[Any]:
        """Return the events of a stream, `[DONE]` as text."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status == 200, answer.body
        return parse_events(answer.body)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
        await self.session.close()


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error's fields; checks that nothing else is there but what a refusal adds."""
        assert self.json.keys() == {"error"}
        error: dict[str, Any] = self.json["error"]
        assert error.keys() - REFUSAL_FIELDS == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return error


def parse_events(body: bytes) -> list[Any]:
    """Split a stream; every event must be one `data:` line and an empty line."""
    assert body.endswith(b"\n\n")
    events: list[Any] = []
    for part in body.decode().removesuffix("\n\n").split("\n\n"):
        assert part.startswith("data: ")
        assert "\n" not in part
        data = part.removeprefix("data: ")
        events.append(data if data == "[DONE]" else orjson.loads(data))
    return events


async def named_events(served: Served, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the events of a stream whose events have names, each with its name."""
    answer = await served.post(path, {**body, "stream": True})
    assert answer.status == 200, answer.body
    events = []
    for part in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    return events


@asynccontextmanager
async def serving(
    engine: FakeEngine,
    *,
    tokenizer: ByteTokenizer | None = None,
    template: str | None = TEMPLATE,
    has_fleet: bool = False,
    **fields: Any,
) -> AsyncIterator[Served]:
    """Serve an engine; with `has_fleet` it is the client of a fleet."""
    config = ServerConfig(port=0, **fields)
    app = make_app(engine, config, tokenizer=tokenizer, template=template, has_fleet=has_fleet)
    sock = bind(config)
    # connections inherit it: a client that does not read then stops its stream soon
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    how = uvicorn_config(app, config)
    how.load()
    server = uvicorn.Server(how)
    server.lifespan = how.lifespan_class(how)
    await server.startup([sock])
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    served = Served(url, engine, app, aiohttp.ClientSession())
    try:
        yield served
    finally:
        await served.close()
        # uvicorn's own way out sleeps for tenths of a second, which hundreds of tests would feel
        for listener in server.servers:
            listener.close()
        for connection in list(server.server_state.connections):
            connection.shutdown()
        await until(lambda: not server.server_state.tasks)
        await until(lambda: not server.server_state.connections)
        await server.lifespan.shutdown()
