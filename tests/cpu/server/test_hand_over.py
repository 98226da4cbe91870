"""What counts is when an event is handed over to be sent, not when the engine made it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest

from onbeat.core.protocols import Delivery
from onbeat.core.request import Request, SamplingParams
from onbeat.core.slo import SLO
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.record import RequestRecord
from onbeat.metrics.tracker import RequestTracker
from onbeat.server.answer_report import record_report
from onbeat.server.choices import Choice, TextOptions
from onbeat.server.generation import Generator
from tests.cpu.server.running import HELLO, Served, parse_events
from tests.cpu.server.test_disconnect import leave, send
from tests.cpu.server.test_unread import unchunked
from tests.fakes_engine import ByteTokenizer, FakeEngine, Script

ARRIVAL = 100.0


class EarlyEngine(FakeEngine):
    """Makes all of an answer a second after its arrival."""

    async def generate(self, request: Request):
        async for delivery in super().generate(request):
            yield Delivery(ARRIVAL + 1, delivery.output)


def choices_of(answers: Sequence[str], *, is_streamed: bool, slo: SLO | None = None) -> list[Choice]:
    return [
        Choice(
            index=index,
            prompt_index=0,
            is_streamed=is_streamed,
            request=Request(
                request_id=str(index),
                prompt_token_ids=(1, 2),
                sampling=SamplingParams(max_tokens=len(answer.encode())),
                arrival=ARRIVAL,
                slo=slo,
            ),
        )
        for index, answer in enumerate(answers)
    ]


async def taken(
    choices: Sequence[Choice], answers: Sequence[str], *, step: float
) -> tuple[list[RequestRecord], RunCounts]:
    """Let somebody take the deltas of choices who is `step` seconds late for each; return the records."""
    counts = RunCounts()
    engine = EarlyEngine(Script(answers=list(answers), end=False))
    generator = Generator(engine, ByteTokenizer(), RequestTracker([counts]))
    late = [ARRIVAL + 1]
    async for _ in generator.run(choices, TextOptions(), lambda: late[0]):
        late[0] += step
    return [choice.record for choice in choices if choice.record is not None], counts


async def test_a_stream_is_judged_by_when_it_was_handed_over() -> None:
    choices = choices_of(["abcd"], is_streamed=True, slo=SLO(ttft=1.5, tbt=2.0))
    (record,), counts = await taken(choices, ["abcd"], step=3.0)
    assert list(record.delivery_times) == [101.0, 104.0, 107.0, 110.0]
    assert (record.end, record.finish_reason) == (110.0, "length")
    report = record_report(record, "gap")
    assert report is not None
    assert (report.ttft_ms, report.engine_ttft_ms, report.tbt_p99_ms) == (1000.0, 1000.0, 3000.0)
    assert report.met is False
    assert counts.slo.recent(111.0)["is_good"].tolist() == [False]


async def test_choices_that_wait_for_one_writer_are_late_by_that() -> None:
    answers = ["aaa", "bbb", "ccc"]
    records, counts = await taken(choices_of(answers, is_streamed=True), answers, step=1.0)
    times = sorted(time_ for record in records for time_ in record.delivery_times)
    assert times == [101.0 + k for k in range(9)]
    assert all(record.engine_ttft == 1.0 for record in records)
    assert counts.first_token_lag.sum == counts.ttft.sum - 3


async def test_a_whole_answer_ends_when_all_of_it_can_be_sent() -> None:
    answers = ["a", "bbbb"]
    slo = SLO(ttft=10.0, e2e=4.5)
    records, counts = await taken(choices_of(answers, is_streamed=False, slo=slo), answers, step=1.0)
    assert [record.end for record in records] == [106.0, 106.0]
    assert [record.finish_reason for record in records] == ["length", "length"]
    assert max(record.delivery_times[0] for record in records) < 104
    assert counts.slo.recent(107.0)["is_good"].tolist() == [False, False]
    assert counts.e2e.sum == 12.0


async def test_text_that_is_held_back_counts_at_its_turn() -> None:
    """Half a character is not shown, and is no reason to find a stream late."""
    answer = "aé"
    (record,), _ = await taken(choices_of([answer], is_streamed=True), [answer], step=1.0)
    assert list(record.delivery_times) == [101.0, 102.0, 102.0]
    assert record.num_output_tokens == 3


async def test_an_answer_that_nobody_takes_to_its_end_is_closed() -> None:
    counts = RunCounts()
    tracker = RequestTracker([counts])
    engine = EarlyEngine(Script(answers=["ab", "cd"], end=False))
    generator = Generator(engine, ByteTokenizer(), tracker)
    choices = choices_of(["ab", "cd"], is_streamed=True)
    deltas = generator.run(choices, TextOptions())
    await anext(deltas)
    await deltas.aclose()
    assert counts.num_open == 0
    assert counts.finished.total() == 2
    assert all(choice.record is not None and not math.isnan(choice.record.end) for choice in choices)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_time_of_a_reader_is_not_the_servers(served: Served, engine: FakeEngine, n: int) -> None:
    engine.script = Script("x", end=False)
    objectives = {"ttft_ms": 60_000, "tbt_ms": 30_000}
    body = {"messages": HELLO, "stream": True, "n": n, "max_tokens": 2000, "slo": objectives}
    start = time.monotonic()
    reader, writer = await send(served, body)
    await asyncio.sleep(2.0)  # it waits for its reader from early on: sockets hold little
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        data += await reader.read(2**16)
    elapsed = time.monotonic() - start
    metrics = (await served.get("/metrics")).body.decode()
    name = "onbeat_request_e2e_seconds_sum "
    e2e = next(float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name)) / n
    assert e2e < elapsed - 1.5
    events = parse_events(unchunked(data.partition(b"\r\n\r\n")[2]))
    assert events[-2]["slo"]["tbt_p99_ms"] < 1000
    assert np.isfinite(events[-2]["slo"]["engine_ttft_ms"])
    await leave(writer)
