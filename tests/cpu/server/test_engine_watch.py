"""An engine that hangs is seen, and so is that it goes on."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from onbeat.core.hang import HangLimits, find_hang
from onbeat.core.protocols import EnginePulse
from tests.cpu.server.running import Served, serving
from tests.direct_client import ProcessEngineClient
from tests.fake_runner import build_fake_engine
from tests.fakes_engine import FakeEngine
from tests.many_cases import each_case
from tests.waiting import at_most


@asynccontextmanager
async def serving_process(
    hang: HangLimits, *, step_seconds: float
) -> AsyncIterator[tuple[Served, ProcessEngineClient]]:
    """A server before an engine in a process of its own."""
    async with (
        ProcessEngineClient(partial(build_fake_engine, step_seconds=step_seconds)) as client,
        serving(cast(FakeEngine, client), hang=hang) as served,
    ):
        yield served, client


LIMITS = HangLimits(silence_seconds=1.3, step_seconds=0.8, step_ratio=100)


@each_case(
    ("pulse", "reason"),
    [
        (EnginePulse(71.0), None),
        (EnginePulse(69.0), "it has said nothing for 31 s"),
        (EnginePulse(99.5, 71.0, 0.01), None),
        (EnginePulse(99.5, 69.0, 0.01), "its step has run for 31 s instead of 0.01 s"),
        (EnginePulse(99.5, 20.0, 0.9), None),
        (EnginePulse(99.5, 20.0, 0.7), "its step has run for 80 s instead of 0.7 s"),
        (EnginePulse(99.5, -400.0, None), None),
        (EnginePulse(99.5, -600.0, None), "its step has run for 700 s"),
        (EnginePulse(69.0, waited=5.0), None),
        (EnginePulse(60.0, waited=5.0), "it has said nothing for 35 s, not counting 5 s without a processor"),
        (EnginePulse(99.5, 20.0, 0.01, waited=60.0), None),
        (
            EnginePulse(99.5, 20.0, 0.01, waited=40.0),
            "its step has run for 40 s instead of 0.01 s, not counting 40 s without a processor",
        ),
        (EnginePulse(99.5, -600.0, None, waited=150.0), None),
    ],
)
def test_what_a_hang_is(pulse: EnginePulse, reason: str | None) -> None:
    assert find_hang(pulse, HangLimits(), 100.0) == reason


async def health(served: Served) -> tuple[int, str]:
    answer = await served.get("/health")
    if answer.status == 200:
        return 200, ""
    assert answer.headers["Retry-After"] == "5"
    return answer.status, answer.error["code"]


async def becomes(served: Served, status: int, timeout: float = 6.0) -> float:
    """Wait until /health has a status; return how long that took."""
    start = time.monotonic()
    async with at_most(timeout):
        while (await health(served))[0] != status:
            await asyncio.sleep(0.02)
    return time.monotonic() - start


async def metric(served: Served, name: str) -> float:
    text = (await served.get("/metrics")).body.decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.alone
async def test_a_stopped_engine_is_seen_until_it_goes_on(
    is_busy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_process(LIMITS, step_seconds=0.05) as (served, client):
        body = {"prompt": "x", "max_tokens": 20, "ignore_eos": True}
        request = asyncio.create_task(served.post("/v1/completions", body)) if is_busy else None
        await asyncio.sleep(0.3)
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGSTOP)
        try:
            assert await becomes(served, 503) > 0.5
            assert (await health(served)) == (503, "engine_hangs")
            assert (await served.get("/ready")).status == 503
            assert await metric(served, "onbeat_engine_silence_seconds") > LIMITS.silence_seconds
            await asyncio.sleep(0.3)
        finally:
            os.kill(client.process_id, signal.SIGCONT)
        await becomes(served, 200)
        assert await metric(served, "onbeat_engine_alive") == 1
        assert await metric(served, "onbeat_engine_silence_seconds") < LIMITS.silence_seconds
        if request is not None:
            assert (await request).status == 200
    lines = [record.getMessage() for record in caplog.records if "engine" in record.getMessage()]
    assert len(lines) == 2
    # seconds in whole numbers: how late the look came depends on what else the machine does
    assert re.match(r"the engine hangs: .* \d s;", lines[0])
    assert "goes on" in lines[1]


@pytest.mark.alone
async def test_long_steps() -> None:
    """Of two servers: neither takes the processor."""
    await asyncio.gather(a_step_that_does_not_end_is_seen_until_it_does(), a_long_step_is_no_silence())


async def a_step_that_does_not_end_is_seen_until_it_does() -> None:
    async with serving_process(LIMITS, step_seconds=2.5) as (served, _):
        body = {"prompt": "x", "max_tokens": 1}
        request = asyncio.create_task(served.post("/v1/completions", body))
        await becomes(served, 503)
        assert "step" in (await served.get("/health")).error["message"]
        assert await metric(served, "onbeat_engine_step_age_seconds") > 0.8
        assert await metric(served, "onbeat_engine_silence_seconds") < LIMITS.silence_seconds
        await becomes(served, 200)
        assert (await request).status == 200
        assert await metric(served, "onbeat_engine_step_age_seconds") == 0


async def a_long_step_is_no_silence() -> None:
    limits = replace(LIMITS, step_seconds=10)
    async with serving_process(limits, step_seconds=1.8) as (served, _):
        request = asyncio.create_task(served.post("/v1/completions", {"prompt": "x", "max_tokens": 1}))
        while not request.done():
            assert (await health(served))[0] == 200
            await asyncio.sleep(0.05)
        assert (await request).status == 200


async def test_a_server_without_its_engine_says_so(served: Served, engine: FakeEngine) -> None:
    assert await metric(served, "onbeat_engine_alive") == 1
    engine.is_alive = False
    assert await health(served) == (503, "engine_dead")
    assert await metric(served, "onbeat_engine_alive") == 0
    answer = await served.post("/v1/completions", {"prompt": "x"})
    assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
