"""Clients that do not read what they have asked for: all of them together hold no more than a bound."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from onbeat.server import middleware
from onbeat.server.pieces import PIECE_BYTES, PiecesResponse, SlowReaders
from tests.cpu.server.running import HELLO, Served, parse_events, serving
from tests.cpu.server.test_disconnect import leave, send
from tests.fakes_engine import FakeEngine, Script
from tests.fleet.fleets import fleet_of
from tests.waiting import until

MOST = 200_000
FIELDS = {"messages": HELLO, "ignore_eos": True}
SLOW = "its client does not read"


@asynccontextmanager
async def served_fleet():
    """Serve an engine that goes on whether its tokens are taken or not, as the real one does."""
    async with (
        fleet_of(1, step_seconds=0.001, num_blocks=20_000, max_model_len=40_000) as client,
        serving(cast(FakeEngine, client), has_fleet=True, max_unread_bytes=MOST) as served,
    ):
        yield served, client


def unchunked(body: bytes) -> bytes:
    """Return the content of chunks."""
    content = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        content, body = content + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return content


async def test_a_stream_that_nobody_reads_ends(caplog: pytest.LogCaptureFixture) -> None:
    async with served_fleet() as (served, client):
        reader, writer = await send(served, {**FIELDS, "stream": True, "n": 16, "max_tokens": 30_000})
        await until(lambda: SLOW in caplog.text, timeout=30)
        await until(lambda: not client.replicas()[0].num_outstanding)
        name, _, words = next(r.getMessage() for r in caplog.records if SLOW in r.getMessage()).partition(" ")
        assert name.startswith("chatcmpl-")
        assert "0.2 MB" in words
        # Others are served, and whoever reads on at last is told.
        assert (await served.post("/v1/chat/completions", {**FIELDS, "max_tokens": 5})).status == 200
        head, _, body = (await _all_of(reader)).partition(b"\r\n\r\n")
        events = parse_events(unchunked(body))
        assert b" 200 " in head
        assert events[-2]["error"]["code"] == "read_too_slowly"
        assert str(MOST) in events[-2]["error"]["message"]
        await leave(writer)


async def _all_of(reader: asyncio.StreamReader) -> bytes:
    """Read to the end of a stream."""
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await reader.read(2**16)
    return data


async def test_a_stream_that_is_read_slowly_within_the_bound_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served_fleet() as (served, _):
        reader, writer = await send(served, {**FIELDS, "stream": True, "max_tokens": 400})
        await asyncio.sleep(1.0)  # all of it waits in sockets, and less than the bound behind them
        _, _, body = (await _all_of(reader)).partition(b"\r\n\r\n")
        assert parse_events(unchunked(body))[-2]["choices"][0]["finish_reason"] == "length"
        assert SLOW not in caplog.text
        await leave(writer)


@pytest.mark.parametrize("served", [{"max_unread_bytes": 2 * MOST}], indirect=True)
async def test_a_whole_answer_that_nobody_reads_ends(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.script = Script("x" * 100, end=False, tokens_per_step=100)
    body: dict[str, Any] = {**FIELDS, "max_tokens": 1500, "logprobs": True, "top_logprobs": 20}
    with caplog.at_level("INFO"):
        reader, writer = await send(served, body)
        await until(lambda: SLOW in caplog.text, timeout=30)
        await until(lambda: "error=read_too_slowly" in caplog.text)
    head, _, body_read = (await reader.read(-1)).partition(b"\r\n\r\n")  # to the end: the connection closes
    length = int(next(line for line in head.split(b"\r\n") if b"content-length" in line.lower()).split()[1])
    assert len(body_read) < length
    assert not any(record.exc_info for record in caplog.records)
    await leave(writer)


async def test_two_answers_that_are_read_stay_beside_one_that_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with served_fleet() as (served, _):
        fields = {**FIELDS, "max_tokens": 1000}
        stays = [asyncio.create_task(served.events("/v1/chat/completions", fields)) for _ in range(2)]
        _, writer = await send(served, {**FIELDS, "stream": True, "n": 16, "max_tokens": 30_000})
        await until(lambda: SLOW in caplog.text, timeout=30)
        for stream in await asyncio.gather(*stays):
            assert stream[-2]["choices"][0]["finish_reason"] == "length"
        assert caplog.text.count(SLOW) == 1
        await leave(writer)


@pytest.mark.parametrize("sizes", [[0], [10], [PIECE_BYTES], [10, 3 * PIECE_BYTES, 10]])
async def test_the_last_bytes_of_an_answer_say_that_they_are_the_last(sizes: list[int]) -> None:
    """Who has all of them asks again at once, on the same connection: the server must be ready by then."""
    pieces = [b"x" * size for size in sizes]
    sent: list[Any] = []

    async def send_on(message: Any) -> None:
        sent.append(message)

    scope: Any = {"type": "http", middleware._CONTEXT: middleware.HttpContext("a", "/x")}
    await PiecesResponse(pieces, SlowReaders(MOST))(scope, cast(Any, None), send_on)
    start, *bodies = sent
    assert dict(start["headers"])[b"content-length"] == b"%d" % sum(sizes)
    assert b"".join(each["body"] for each in bodies) == b"".join(pieces)
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]
    assert len(bodies) == 1 or bodies[-1]["body"], "nothing is left to come behind the announced length"
