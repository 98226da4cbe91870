"""The engine in its own process behind the asyncio client."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial

import pytest

from onbeat.core.errors import ConfigError, EngineDead, EngineError, InvalidRequest, PromptTooLong
from onbeat.core.request import FinishReason, Request, SamplingParams
from onbeat.engine.client import ProcessEngineClient
from tests.fake_runner import build_fake_engine


class StepLog:
    def __init__(self):
        self.messages = []

    def on_step(self, message):
        self.messages.append(message)


def make_request(request_id="a", num_prompt=5, max_tokens=8):
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=time.monotonic(),
    )


async def collect(client, request):
    tokens, reason = [], None
    async for delivery in client.generate(request):
        tokens += delivery.output.new_token_ids
        reason = delivery.output.finish_reason
    return tokens, reason


async def wait_for(condition, timeout=5.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def engine(**options):
    return ProcessEngineClient(partial(build_fake_engine, **options))


async def test_streams_run_beside_one_another():
    log, lines = StepLog(), []
    client = ProcessEngineClient(
        partial(build_fake_engine, step_seconds=0.001), observers=[log], on_progress=lines.append
    )
    async with client:
        assert client.is_alive
        assert client.info.model_name == "fake"
        requests = [make_request(f"r{i}", 3 + i, 10) for i in range(40)]
        results = await asyncio.gather(*(collect(client, request) for request in requests))
        assert await client.is_idle()
    for i, (tokens, reason) in enumerate(results):
        assert tokens == [(3 + i + k) % 97 for k in range(10)]
        assert reason is FinishReason.LENGTH
    assert lines == ["building a fake engine"]
    assert max(message.stats.num_running for message in log.messages) > 10


async def test_closing_a_stream_aborts_its_request():
    log = StepLog()
    client = ProcessEngineClient(partial(build_fake_engine, step_seconds=0.002), observers=[log])
    async with client:
        stream = client.generate(make_request(max_tokens=900))
        await anext(stream)
        await stream.aclose()
        tokens, _ = await collect(client, make_request("b"))
        assert len(tokens) == 8
        assert log.messages[-1].stats.num_used_blocks == 0
        count = len(log.messages)
        await asyncio.sleep(0.05)
        assert len(log.messages) == count, "the engine still steps for nobody"


async def test_abort_ends_the_stream():
    async with engine(step_seconds=0.002) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=900)))
        await asyncio.sleep(0.05)
        await client.abort(["a", "unknown"])
        _, reason = await task
        assert reason is FinishReason.ABORT


async def test_a_killed_engine_fails_open_streams_and_later_ones():
    async with engine(step_seconds=0.01) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=900)))
        await asyncio.sleep(0.05)
        os.kill(client.process_id, signal.SIGKILL)
        with pytest.raises(EngineDead, match="engine process has ended"):
            await asyncio.wait_for(task, 5)
        assert not client.is_alive
        with pytest.raises(EngineDead):
            await collect(client, make_request("b"))


async def test_a_signal_to_the_whole_group_does_not_end_the_engine():
    async with engine(step_seconds=0.002) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=50)))
        await asyncio.sleep(0.02)
        os.kill(client.process_id, signal.SIGTERM)
        os.kill(client.process_id, signal.SIGINT)
        tokens, _ = await task
        assert len(tokens) == 50


async def test_rejections_reach_the_caller():
    async with engine() as client:
        with pytest.raises(PromptTooLong, match="1024"):
            await collect(client, make_request(num_prompt=2000))
        with pytest.raises(InvalidRequest, match="no tokens"):
            await collect(client, make_request(num_prompt=0))
        with pytest.raises(EngineError, match="bad logits"):
            await collect(client, make_request("bad"))
        tokens, _ = await collect(client, make_request("good"))
        assert len(tokens) == 8


async def test_an_id_in_use_is_rejected_and_the_first_goes_on():
    async with engine(step_seconds=0.005) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=20)))
        await asyncio.sleep(0.02)
        with pytest.raises(InvalidRequest, match="in use"):
            await collect(client, make_request())
        tokens, _ = await task
        assert len(tokens) == 20


async def test_a_wrong_configuration_is_the_callers_error():
    with pytest.raises(ConfigError, match="unknown policy 'fifo'"):
        async with engine(policy="fifo"):
            pass


def _exit_at_start(on_progress):
    os._exit(7)


async def test_an_engine_that_dies_at_start_does_not_hang():
    with pytest.raises(EngineDead, match="exit code 7"):
        async with ProcessEngineClient(_exit_at_start):
            pass


async def test_stop_ends_the_process():
    async with engine(step_seconds=0.01) as client:
        process_id = client.process_id
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
