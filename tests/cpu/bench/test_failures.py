"""What the load client makes of servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from onbeat.bench.bench_load import BenchLoad
from onbeat.bench.client import Endpoint, StreamingClient, open_session
from onbeat.bench.record import PayloadBuilder, SentRequest, Status
from tests.cpu.bench.measure import measure
from tests.fake_openai import FakeOpenAI


@pytest.mark.parametrize(
    ("fault", "cause", "detail"),
    [
        ("status:500", "HTTP 500", "fault 500"),
        ("status:400", "HTTP 400", "fault 400"),
        ("cut", "broken stream", "in mid-answer"),
        ("end", "broken stream", "without a finish reason"),
        ("error", "error in stream", "the engine failed"),
        ("odd", "malformed chunk", "not an OpenAI chunk"),
        ("empty", "no text", "finish reason: length"),
    ],
)
async def test_failures_are_grouped_by_cause(fault: str, cause: str, detail: str) -> None:
    fake = FakeOpenAI(fail_every=4, fault=fault)

    result = await measure(fake, BenchLoad(max_concurrency=3))

    assert (result.summary.counts.num_completed, result.summary.counts.num_failed) == (15, 5)
    assert result.summary.counts.num_rejected == 0
    [group] = result.errors
    assert (group["status"], group["cause"], group["count"]) == ("failed", cause, 5)
    assert detail in str(group["example"])


@pytest.mark.parametrize("status", [429, 503])
async def test_rejections_stand_apart_from_failures(status: int) -> None:
    fake = FakeOpenAI(fail_every=2, fault=f"status:{status}")

    result = await measure(fake, BenchLoad(max_concurrency=3))

    assert (
        result.summary.counts.num_completed,
        result.summary.counts.num_failed,
        result.summary.counts.num_rejected,
    ) == (10, 0, 10)
    assert result.errors[0]["status"] == "rejected"


async def test_a_server_that_never_answers_is_a_timeout() -> None:
    fake = FakeOpenAI(fail_every=2, fault="hang")

    result = await measure(fake, BenchLoad(max_concurrency=2), num_prompts=4, target={"request_timeout": 0.3})

    assert result.summary.counts.num_completed == 2
    assert result.errors[0]["cause"] == "timeout"


async def test_failed_requests_keep_no_latency_but_their_time_counts() -> None:
    fake = FakeOpenAI(fail_every=1, fault="cut", token_delay=0.01)

    result = await measure(fake, BenchLoad(max_concurrency=2), num_prompts=4)

    assert result.summary.counts.num_completed == 0
    assert result.values["mean_ttft_ms"] is None
    assert result.summary.counts.duration > 0.03


@asynccontextmanager
async def raw_server(answers: list[bytes], *, closes: bool) -> AsyncIterator[tuple[str, list[int]]]:
    """Answer request k of each connection with `answers[k]`; yields the URL and requests per connection."""
    served: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = len(served)
        served.append(0)
        try:
            while served[connection] < len(answers):
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                await reader.readexactly(length)
                writer.write(answers[served[connection]])
                served[connection] += 1
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            if closes or served[connection]:
                writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}/v1/completions", served
    finally:
        server.close()


ANSWER = b'data: {"choices": [{"text": "hi", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
GOOD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(ANSWER) + ANSWER
)


async def send_all(url: str, count: int) -> list[SentRequest]:
    endpoint = Endpoint(url=url, payload=PayloadBuilder(api="completions", model="m"), timeout=5)
    async with open_session(5) as session:
        client = StreamingClient(session, endpoint)
        return [await send_one(client, session, index) for index in range(count)]


async def send_one(client: StreamingClient, session: aiohttp.ClientSession, index: int) -> SentRequest:
    return await client.send("p", SentRequest(index=index, num_prompt_tokens=1, max_tokens=1))


async def test_a_kept_connection_that_the_server_closed_is_replaced() -> None:
    # The second request of each connection gets an empty answer: the connection just ends.
    async with raw_server([GOOD, b""], closes=True) as (url, served):
        records = await send_all(url, 4)

    assert [record.status for record in records] == [Status.COMPLETED] * 4
    assert len(served) >= 3


async def test_a_fresh_connection_that_ends_is_a_failure_and_not_repeated() -> None:
    async with raw_server([b""], closes=True) as (url, served):
        [record] = await send_all(url, 1)

    assert record.status is Status.FAILED
    assert record.cause == "connection lost"
    assert served == [1]


async def test_an_answer_cut_below_its_length_is_a_broken_stream() -> None:
    async with raw_server([GOOD[:-30]], closes=True) as (url, _):
        [record] = await send_all(url, 1)

    assert (record.status, record.cause) == (Status.FAILED, "broken stream")


async def test_an_error_page_that_is_not_json_is_quoted() -> None:
    page = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 13\r\n\r\n<h1>oops</h1>"
    async with raw_server([page], closes=True) as (url, _):
        [record] = await send_all(url, 1)

    assert (record.cause, record.detail) == ("HTTP 502", "<h1>oops</h1>")
