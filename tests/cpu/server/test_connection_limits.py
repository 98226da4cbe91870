"""What a client may hold open and send before its request is complete, on real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from onbeat.server.connection import BoundedConnection
from onbeat.server.server_config import ConnectionLimits
from tests.cpu.server.running import HELLO, Served, parse_events, serving
from tests.fakes_engine import FakeEngine
from tests.waiting import at_most

CHAT = "/v1/chat/completions"
POST = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
SHORT = ConnectionLimits(head_seconds=0.3, body_seconds=0.3)


@asynccontextmanager
async def limited(limits: ConnectionLimits, **script: Any) -> AsyncIterator[Served]:
    engine = FakeEngine()
    for name, value in script.items():
        setattr(engine.script, name, value)
    async with serving(engine, connections=limits, api_keys=("key",), max_body_bytes=250_000) as served:
        yield served


class Client:
    """A bare connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def end(self, timeout: float = 5.0) -> bytes:
        """Return all that comes until the server closes the connection."""
        async with asyncio.timeout(timeout):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""


@asynccontextmanager
async def connected(served: Served, first: bytes = b"") -> AsyncIterator[Client]:
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(first)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def refusals(served: Served) -> dict[str, float]:
    text = (await served.get("/metrics")).body.decode()
    lines = [line for line in text.splitlines() if line.startswith("onbeat_http_connections_refused_total{")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["code"]


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"x-long: " + b"a" * 70_000, id="one header"),
        pytest.param(b"x: y\r\n" * 12_000 + b"x: y", id="many headers"),
    ],
)
@pytest.mark.parametrize("is_ended", [True, False])
async def test_large_headers_are_refused(head: bytes, is_ended: bool) -> None:
    async with limited(ConnectionLimits()) as served:
        end = b"\r\nx-last: z\r\n\r\n" if is_ended else b""
        async with connected(served, POST + head + end) as client:
            assert error_of(await client.end()) == (431, "headers_too_large")
        assert await refusals(served) == {"headers_too_large": 1}


async def test_an_endless_header_is_stopped() -> None:
    async with limited(ConnectionLimits()) as served, connected(served, POST + b"x-long: ") as client:
        client.writer.write(b"a" * 2**17)
        assert error_of(await client.end()) == (431, "headers_too_large")
        async with at_most(5):
            with pytest.raises(ConnectionError):
                await send_for_ever(client, b"a" * 2**16)
        assert (await served.get("/health")).status == 200


async def send_for_ever(client: Client, piece: bytes) -> None:
    while True:
        client.writer.write(piece)
        await client.writer.drain()
        await asyncio.sleep(0.001)


async def test_headers_below_the_limit_are_fine() -> None:
    async with limited(ConnectionLimits()) as served:
        head = POST + b"x-long: " + b"a" * 60_000 + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
        async with connected(served, head) as client:
            assert (await client.end()).startswith(b"HTTP/1.1 401 ")
        assert await refusals(served) == {}


@pytest.mark.parametrize("extra", [b"2;" + b"e" * 90_000, b"0\r\nx-trailer: " + b"t" * 90_000])
async def test_what_is_no_body_within_a_body_is_bounded_too(extra: bytes) -> None:
    async with limited(ConnectionLimits()) as served:
        head = POST + b"authorization: Bearer key\r\ntransfer-encoding: chunked\r\n\r\n"
        async with connected(served, head + b"2\r\n{}\r\n") as client:
            await asyncio.sleep(0.05)
            client.writer.write(extra)
            assert error_of(await client.end()) == (431, "headers_too_large")


async def test_a_silent_connection_is_closed() -> None:
    async with limited(SHORT) as served, connected(served) as client:
        assert await client.end() == b""
        assert await refusals(served) == {}


@pytest.mark.parametrize("keeps_alive", [False, True])
async def test_slow_headers_are_given_up(keeps_alive: bool) -> None:
    async with limited(SHORT) as served, connected(served) as client:
        if keeps_alive:
            client.writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        client.writer.write(POST)
        start = time.monotonic()
        drip = asyncio.create_task(drip_into(client, b"x: y\r\n"))
        async with at_most(2):
            assert error_of(await client.end()) == (408, "slow_headers")
        assert time.monotonic() - start > 0.2
        drip.cancel()
        assert await refusals(served) == {"slow_headers": 1}


async def drip_into(client: Client, piece: bytes) -> None:
    while True:
        await asyncio.sleep(0.05)
        client.writer.write(piece)


async def test_a_body_that_does_not_come_on_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with limited(SHORT) as served:
        head = POST + b"authorization: Bearer key\r\ncontent-length: 100000\r\n\r\n{"
        async with connected(served, head) as client:
            drip = asyncio.create_task(drip_into(client, b" "))
            assert error_of(await client.end()) == (408, "slow_body")
            drip.cancel()
        await check_only_refused(served, CHAT, {"slow_body": 1}, caplog)


async def test_the_rest_of_a_body_that_was_answered_already_is_given_up() -> None:
    head = POST + b"content-length: 100000\r\n\r\n{"
    async with limited(SHORT) as served, connected(served, head) as client:
        drip = asyncio.create_task(drip_into(client, b" "))
        answer = await client.end()
        assert answer.startswith(b"HTTP/1.1 401 ")
        assert answer.count(b"HTTP/1.1") == 1
        drip.cancel()


async def test_a_body_that_comes_on_may_take_long() -> None:
    async with limited(SHORT) as served:
        data = json.dumps({"messages": HELLO, "max_tokens": 2}).encode().ljust(240_000)
        head = POST + b"authorization: Bearer key\r\nconnection: close\r\n"
        async with connected(served, head + b"content-length: %d\r\n\r\n" % len(data)) as client:
            for start in range(0, len(data), 20_000):
                client.writer.write(data[start : start + 20_000])
                await asyncio.sleep(0.08)
            assert (await client.end()).startswith(b"HTTP/1.1 200 ")
        assert await refusals(served) == {}


@pytest.mark.parametrize(
    "behind", [b"", POST, POST + b"authorization: Bearer key\r\ncontent-length: 9\r\n\r\n{"]
)
async def test_no_limit_cuts_an_answer(behind: bytes) -> None:
    """A long stream, with nothing behind it, and with the beginnings of a next request."""
    async with limited(SHORT, end=False, seconds_per_step=0.05) as served:
        data = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 30}).encode()
        head = POST + b"authorization: Bearer key\r\ncontent-length: %d\r\n\r\n" % len(data)
        async with connected(served, head + data) as client:
            await client.reader.readuntil(b"\r\n\r\n")
            client.writer.write(behind)
            async with at_most(10):
                body = await client.reader.readuntil(b"\r\n0\r\n\r\n")
            assert body.count(b"data: ") == 32
            assert b"[DONE]" in body


async def test_one_connection_more_than_may_be_is_refused() -> None:
    three = ConnectionLimits(max_connections=3)
    async with limited(three) as served, connected(served), connected(served), connected(served) as third:
        await asyncio.sleep(0.05)
        async with connected(served) as fourth:
            answer = await fourth.end()
        assert error_of(answer) == (503, "too_many_connections")
        assert b"\r\nretry-after: 1\r\n" in answer
        third.writer.transport.abort()
        await asyncio.sleep(0.05)
        assert (await served.get("/health")).status == 200
        assert await refusals(served) == {"too_many_connections": 1}


async def test_what_is_not_http_is_refused_in_words() -> None:
    async with limited(ConnectionLimits()) as served, connected(served, b"hello\r\n\r\n") as client:
        assert error_of(await client.end()) == (400, "malformed_request")


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_request_that_offers_http2_is_answered_as_any_other(is_split: bool, is_chunked: bool) -> None:
    """Java's client and `curl --http2` offer it, and send the body without waiting."""
    data = json.dumps({"messages": HELLO, "max_tokens": 2}).encode()
    offer = b"authorization: Bearer key\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    framing, body = b"content-length: %d\r\n\r\n" % len(data), data
    if is_chunked:
        framing, body = b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
    async with limited(ConnectionLimits()) as served, connected(served) as client:
        for _ in range(2):
            for piece in (POST + offer + framing, body) if is_split else (POST + offer + framing + body,):
                client.writer.write(piece)
                await asyncio.sleep(0.01)
            async with at_most(5):
                head = await client.reader.readuntil(b"\r\n\r\n")
                size = int(head.lower().split(b"content-length: ")[1].split()[0])
                answer = json.loads(await client.reader.readexactly(size))
            assert answer["choices"][0]["message"]["content"] == "He"
        assert await refusals(served) == {}


async def test_requests_that_offer_http2_one_behind_another_are_dropped_as_others_are() -> None:
    offer = POST + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 0\r\n\r\n"
    async with limited(ConnectionLimits()) as served, connected(served, offer * 500) as client:
        assert (await client.end()).count(b"HTTP/1.1 401 ") == 1
        assert await refusals(served) == {"pipelined_request": 1}


async def test_a_client_of_http_1_0_gets_a_stream_without_chunks() -> None:
    data = json.dumps({"messages": HELLO, "stream": True}).encode()
    head = POST.replace(b"1.1", b"1.0") + b"authorization: Bearer key\r\ncontent-length: %d\r\n\r\n" % len(
        data
    )
    async with limited(ConnectionLimits()) as served, connected(served, head + data) as client:
        answer, _, body = (await client.end()).partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in answer
        assert parse_events(body)[-1] == "[DONE]"
        assert (await served.get("/health")).status == 200


def connections() -> list[BoundedConnection]:
    gc.collect()  # a connection and its transport hold each other; who else does is asked
    # `isinstance` would ask each object for its class, at which some of torch's warn
    return [each for each in gc.get_objects() if type(each) is BoundedConnection]


async def test_nothing_is_kept_of_a_connection_that_was_reset_after_its_answer() -> None:
    of_other_tests = {id(each): each for each in connections()}
    async with limited(ConnectionLimits()) as served:
        for _ in range(5):
            async with connected(served, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as client:
                await client.reader.readuntil(b"\r\n\r\n")
                linger = struct.pack("ii", 1, 0)  # closing resets the connection
                client.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        async with at_most(10):  # less than connections are kept alive for
            while any(id(each) not in of_other_tests for each in connections()):
                await asyncio.sleep(0.05)


BAD_FRAMING = [
    pytest.param(b"transfer-encoding: chunked\r\n\r\nzz\r\n", id="bad size"),
    pytest.param(b"transfer-encoding: xchunked\r\n\r\nzz\r\n", id="unknown coding"),
    pytest.param(b"transfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\nzz\r\n", id="expects 100"),
    pytest.param(b"transfer-encoding: chunked\r\n\r\n2\r\n{}x", id="no end of a chunk"),
]


@pytest.mark.parametrize("rest", BAD_FRAMING)
@pytest.mark.parametrize(
    ("start", "endpoint"),
    [
        ("GET /health", "/health"),
        ("GET /v1/models", "/v1/models"),
        ("PUT /nowhere", "unmatched"),
        (f"POST {CHAT}", CHAT),
    ],
)
async def test_bad_framing_behind_a_good_head_is_a_400(
    start: str, endpoint: str, rest: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    head = f"{start} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n".encode()
    with caplog.at_level("INFO"):
        async with serving(FakeEngine()) as served:
            for _ in range(3):
                async with connected(served, head + rest) as client:
                    assert error_of(await client.end()) == (400, "malformed_request")
            await check_only_refused(served, endpoint, {"malformed_request": 3}, caplog)


async def test_bad_framing_of_a_body_that_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        async with serving(FakeEngine()) as served:
            async with connected(served, POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n") as client:
                await asyncio.sleep(0.05)
                client.writer.write(b"no-size\r\n")
                assert error_of(await client.end()) == (400, "malformed_request")
            await check_only_refused(served, CHAT, {"malformed_request": 1}, caplog)


async def test_over_the_sum_of_unfinished_bodies_the_oldest_is_given_up() -> None:
    room = ConnectionLimits(max_unfinished_bytes=1_000_000)
    data = json.dumps({"messages": HELLO, "max_tokens": 2}).encode().rjust(250_000)
    head = POST + b"connection: close\r\ncontent-length: 250000\r\n\r\n"
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(
            serving(FakeEngine(), connections=room, max_body_bytes=len(data))
        )
        for _ in range(2):  # what was complete, or given up, leaves its room to others
            clients = []
            for _ in range(6):
                clients.append(await stack.enter_async_context(connected(served, head + data[:180_000])))
                await asyncio.sleep(0.05)
            answer = await clients[0].end()
            assert error_of(answer) == (503, "no_room_for_body")
            assert b"\r\nretry-after: 1\r\n" in answer
            for client in clients[1:]:
                client.writer.write(data[180_000:])
                assert (await client.end()).startswith(b"HTTP/1.1 200 ")
        assert await refusals(served) == {"no_room_for_body": 2}


async def test_bodies_that_were_answered_or_cut_take_no_room() -> None:
    """Nor do those that end with their connection, or that nobody reads."""
    room = ConnectionLimits(max_unfinished_bytes=1_000_000)
    half = b"content-length: 250000\r\n\r\n" + b" " * 180_000
    async with limited(room) as served:
        for _ in range(12):
            async with connected(served, POST + half) as client:
                assert (await client.reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 ")
            async with connected(served, POST + b"authorization: Bearer key\r\n" + half):
                await asyncio.sleep(0.05)
        assert await refusals(served) == {}


async def check_only_refused(
    served: Served, endpoint: str, refused: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    """Check that requests are counted and logged as what their clients got, in a short line each."""
    text = (await served.get("/metrics")).body.decode()
    ((reason, times),) = refused.items()
    status = {"malformed_request": 400, "slow_body": 408}[reason]
    counted = [line for line in text.splitlines() if line.startswith("onbeat_http_requests_total{")]
    assert counted == [
        f'onbeat_http_requests_total{{endpoint="{endpoint}",status="{status}"}} {float(times)}'
    ]
    assert await refusals(served) == refused
    lines = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert len(lines) == times
    assert all(f"{status} e2e_ms" in line and line.endswith(f"error={reason}") for line in lines)
    assert [record.levelname for record in caplog.records if record.levelname not in ("INFO", "DEBUG")] == []
    assert max(map(len, lines)) < 200


@pytest.mark.parametrize(
    ("origins", "shown"),
    [(("https://a.example",), "https://a.example"), (("*",), "*"), (("null",), None), ((), None)],
)
async def test_a_page_may_read_why_its_request_was_refused(
    origins: tuple[str, ...], shown: str | None
) -> None:
    limits = ConnectionLimits(head_seconds=0.3, max_head_bytes=1000)
    async with serving(FakeEngine(), connections=limits, allowed_origins=origins) as served:
        for rest in (b"x: " + b"a" * 2000, b"x: a"):  # 431 and 408
            async with connected(served, POST + b"origin: https://a.example\r\n" + rest) as client:
                answer = await client.end()
                assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 408"))
                header = b"access-control-allow-origin: %b\r\n" % (shown or "").encode()
                assert (header in answer) is (shown is not None)
