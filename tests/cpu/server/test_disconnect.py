"""Clients that leave, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.cpu.server.running import HELLO, Served
from tests.fakes_engine import FakeEngine
from tests.waiting import until

CHAT = "/v1/chat/completions"


async def send(
    served: Served, body: dict[str, Any], *, times: int = 1, version: str = "1.1"
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    sock.connect((host, int(port)))
    # a small limit, so that a client that does not read soon stops its connection
    reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
    data = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    writer.write((head + b"content-length: %d\r\n\r\n" % len(data) + data) * times)
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
    await asyncio.sleep(0)


@pytest.fixture
def slow_engine(engine: FakeEngine) -> FakeEngine:
    engine.script.end = False
    engine.script.seconds_per_step = 0.01
    return engine


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_aborts_the_requests(
    served: Served, slow_engine: FakeEngine, stream: bool, n: int
) -> None:
    _, writer = await send(served, {"messages": HELLO, "stream": stream, "n": n})
    await until(lambda: len(slow_engine.running_ids) == n)
    await asyncio.sleep(0.05)
    await leave(writer)
    await until(lambda: not slow_engine.running_ids)
    assert len(slow_engine.aborted) == n
    metrics = (await served.get("/metrics")).body.decode()
    assert f'onbeat_requests_total{{finish_reason="abort"}} {n}.0' in metrics
    assert (await served.get("/load")).json == {"server_load": 0}


@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_with_a_second_request_under_way_aborts(
    served: Served, slow_engine: FakeEngine, stream: bool
) -> None:
    _, writer = await send(served, {"messages": HELLO, "stream": stream}, times=3)
    await until(lambda: slow_engine.running_ids)
    await asyncio.sleep(0.05)
    await leave(writer)
    await until(lambda: not slow_engine.running_ids)
    assert len(slow_engine.requests) == 1


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_side_gets_its_answer(
    served: Served, engine: FakeEngine, stream: bool, version: str
) -> None:
    engine.script.seconds_per_step = 0.01
    engine.script.first_delay = 0.2
    reader, writer = await send(served, {"messages": HELLO, "stream": stream}, version=version)
    await until(lambda: engine.running_ids)
    if stream and version == "1.0":
        await until(lambda: engine.num_steps > 1)
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    if version == "1.0" and not stream:
        assert answer == b""  # nothing could tell it from one that has left
        await until(lambda: engine.aborted)
        return
    *interim, _ = answer.split(b"HTTP/1.1 200 OK\r\n")[0].split(b"\r\n\r\n")
    assert set(interim) == ({b"HTTP/1.1 100 Continue"} if version == "1.1" else set())
    assert b"connection: close" in answer
    assert (b"[DONE]" if stream else b"Hello, world!") in answer


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_closes_its_side_and_leaves_later_aborts(
    served: Served, slow_engine: FakeEngine, stream: bool
) -> None:
    slow_engine.script.first_delay = 60 * (not stream)
    reader, writer = await send(served, {"messages": HELLO, "stream": stream})
    await until(lambda: slow_engine.running_ids)
    writer.write_eof()
    assert (await reader.readline()).startswith(b"HTTP/1.1 ")
    await asyncio.sleep(0.2)
    assert slow_engine.running_ids
    writer.close()  # without a reset of its own
    await until(lambda: not slow_engine.running_ids)


async def test_a_request_before_the_answer_to_the_last_one_ends_the_connection_with_it(
    served: Served, engine: FakeEngine
) -> None:
    engine.script.seconds_per_step = 0.01
    reader, writer = await send(served, {"messages": HELLO}, times=2)
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert json.loads(body)["choices"][0]["message"]["content"] == "Hello, world!"
    metrics = (await served.get("/metrics")).body.decode()
    assert 'onbeat_http_connections_refused_total{reason="pipelined_request"} 1.0' in metrics
    await leave(writer)


async def test_leaving_before_the_first_token_aborts(
    served: Served, slow_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    slow_engine.script.first_delay = 60
    with caplog.at_level("INFO", "onbeat.server"):
        _, writer = await send(served, {"messages": HELLO, "stream": True})
        await until(lambda: slow_engine.running_ids)
        await leave(writer)
        await until(lambda: not slow_engine.running_ids)
        await until(lambda: " 499 " in caplog.text)
    assert "finish=client_gone" in caplog.text
    metrics = (await served.get("/metrics")).body.decode()
    assert f'onbeat_http_requests_total{{endpoint="{CHAT}",status="499"}} 1.0' in metrics


HALF_A_BODY = b"content-length: 100\r\n\r\n{"


async def test_a_body_that_never_comes_is_no_failure_of_the_server(
    served: Served, slow_engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with caplog.at_level("INFO"):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode() + HALF_A_BODY
        )
        await writer.drain()
        await asyncio.sleep(0.05)
        await leave(writer)
        await until(lambda: " 499 " in caplog.text)
    assert [len(record.getMessage()) < 200 for record in caplog.records] == [True]
    assert caplog.records[0].levelname == "INFO"
    assert "finish=client_gone" in caplog.text
    assert slow_engine.requests == []
    metrics = (await served.get("/metrics")).body.decode()
    assert f'onbeat_http_requests_total{{endpoint="{CHAT}",status="499"}} 1.0' in metrics


async def test_one_client_leaving_leaves_the_others(served: Served, slow_engine: FakeEngine) -> None:
    slow_engine.script.seconds_per_step = 0.005
    stays = asyncio.create_task(served.events(CHAT, {"messages": HELLO, "max_tokens": 60}))
    _, writer = await send(served, {"messages": HELLO, "stream": True})
    await until(lambda: len(slow_engine.running_ids) == 2)
    await leave(writer)
    events = await stays
    assert events[-2]["choices"][0]["finish_reason"] == "length"


async def test_a_client_that_does_not_read_holds_its_own_stream_back(
    served: Served, engine: FakeEngine
) -> None:
    engine.script.end = False
    engine.script.text = "x" * 1000
    engine.script.tokens_per_step = 1000
    engine.max_model_len = 10**9
    num_tokens = 1_000_000  # more text than all socket buffers hold
    _, writer = await send(served, {"messages": HELLO, "stream": True, "max_tokens": num_tokens})
    await until(lambda: engine.num_steps > 20)
    steps = -1
    while steps != engine.num_steps:  # until the stream stands still
        steps = engine.num_steps
        await asyncio.sleep(0.1)
    assert steps < num_tokens // 1000
    others = await asyncio.gather(
        *(served.post(CHAT, {"messages": HELLO, "max_tokens": 5}) for _ in range(8))
    )
    assert [answer.status for answer in others] == [200] * 8
    await leave(writer)
    await until(lambda: not engine.running_ids)
