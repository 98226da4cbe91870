"""The engine in its own process behind the asyncio client."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from onbeat.core.errors import (
    ConfigError,
    EngineDead,
    EngineError,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    SLOUnattainable,
)
from onbeat.core.handover import MoveTask, MoveVerb
from onbeat.core.request import FinishReason, Request, SamplingParams
from onbeat.core.slo import SLO, ShedMode
from onbeat.engine.messages import AskMove, OpenKV
from tests.cpu.core.shedding import build_shedding_engine
from tests.direct_client import ProcessEngineClient
from tests.fake_runner import build_fake_engine
from tests.waiting import until


class StepLog:
    def __init__(self):
        self.messages = []

    def on_step(self, message):
        self.messages.append(message)


def make_request(request_id="a", num_prompt=5, max_tokens=8, **fields):
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_prompt)),
        sampling=SamplingParams(max_tokens=max_tokens),
        arrival=time.monotonic(),
        **fields,
    )


async def collect(client, request):
    tokens, reason = [], None
    async for delivery in client.generate(request):
        tokens += delivery.output.new_token_ids
        reason = delivery.output.finish_reason
    return tokens, reason


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
    assert lines == ["building a fake engine"], "details are for the log"
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


async def test_a_killed_engine_fails_open_streams_and_later_ones():
    async with engine(step_seconds=0.01) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=900)))
        await asyncio.sleep(0.05)
        os.kill(client.process_id, signal.SIGKILL)
        with pytest.raises(EngineDead, match="engine process"):
            await asyncio.wait_for(task, 5)
        assert not client.is_alive
        with pytest.raises(EngineDead):
            await collect(client, make_request("b"))


@pytest.mark.parametrize("depth", [1, 2])
async def test_an_engine_that_can_run_no_step_any_more_says_why_and_ends(depth, caplog):
    async with engine(step_seconds=0.01, max_in_flight_steps=depth) as client:
        task = asyncio.create_task(collect(client, make_request(max_tokens=900)))
        await asyncio.sleep(0.05)
        with pytest.raises(EngineDead, match="rank 1"):
            await asyncio.wait_for(collect(client, make_request("dead")), 5)
        with pytest.raises(EngineDead, match="rank 1"):
            await asyncio.wait_for(task, 5)
        assert not client.is_alive
        with pytest.raises(EngineDead, match="rank 1"):
            await collect(client, make_request("b"))
        await until(lambda: not client._process.is_alive())
        assert client._process.exitcode == 1
    assert "rank 1" in caplog.text


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
    with pytest.raises(ConfigError, match="policy 'fifo'"):
        async with engine(policy="fifo"):
            pass


async def test_a_long_path_of_temporary_files_is_told(tmp_path, monkeypatch):
    folder = tmp_path / ("t" * 100)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(ConfigError, match=r"107.*TMPDIR"):
        async with engine():
            pass
    assert list(folder.iterdir()) == []


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


STEP_SECONDS = 0.3
PROMPT_ANSWER_SECONDS = 0.1


def shedding(**options):
    return ProcessEngineClient(partial(build_shedding_engine, **options))


def at_both_depths(check):
    """Run a check with one step under way and with two, side by side from where both engines are ready."""

    async def test(self):
        barrier = asyncio.Barrier(2)
        await asyncio.gather(*(check(self, depth, barrier) for depth in (1, 2)))

    return test


@pytest.mark.alone
class TestWhileAStepRuns:
    """Nothing that needs no step waits for one."""

    @at_both_depths
    async def test_a_refusal_comes_at_once(self, depth, barrier):
        async with shedding(step_seconds=STEP_SECONDS, depth=depth) as client:
            await barrier.wait()
            busy = asyncio.create_task(collect(client, make_request(max_tokens=4)))
            await asyncio.sleep(0.1)
            waits = []
            for index in range(12):  # over all phases of a step
                await asyncio.sleep(0.037)
                request = make_request(f"late{index}", slo=SLO(ttft=0.01), shed=ShedMode.REJECT)
                start = time.monotonic()
                with pytest.raises(SLOUnattainable, match=r"0\.75 s.*0\.01 s") as caught:
                    await collect(client, request)
                waits.append(time.monotonic() - start)
                assert caught.value.predicted_ttft == 0.75
                assert caught.value.retry_after == 1.5
                assert caught.value.code == "slo_unattainable"
            assert max(waits) < PROMPT_ANSWER_SECONDS
            tokens, _ = await busy
            assert len(tokens) == 4

    @at_both_depths
    async def test_an_abort_is_heard_at_once(self, depth, barrier):
        log = StepLog()
        client = ProcessEngineClient(
            partial(build_fake_engine, step_seconds=STEP_SECONDS, max_in_flight_steps=depth), observers=[log]
        )
        async with client:
            await barrier.wait()
            tasks = [asyncio.create_task(collect(client, make_request(name, max_tokens=3))) for name in "ab"]
            await asyncio.sleep(0.15)
            start, before = time.monotonic(), len(log.messages)
            tasks[0].cancel()
            await until(lambda: len(log.messages) > before)
            assert time.monotonic() - start < PROMPT_ANSWER_SECONDS
            tokens, _ = await tasks[1]
            assert len(tokens) == 3

    @at_both_depths
    async def test_requests_that_come_meanwhile_share_the_next_step(self, depth, barrier):
        log = StepLog()
        client = ProcessEngineClient(
            partial(build_fake_engine, step_seconds=STEP_SECONDS, max_in_flight_steps=depth), observers=[log]
        )
        async with client:
            await barrier.wait()
            tasks = [asyncio.create_task(collect(client, make_request("a", max_tokens=4)))]
            await asyncio.sleep(0.1)
            for name in "bcd":
                tasks.append(asyncio.create_task(collect(client, make_request(name, max_tokens=2))))
            await asyncio.gather(*tasks)
        assert max(message.stats.shape.num_sequences for message in log.messages) == 4

    @at_both_depths
    async def test_a_stop_waits_for_no_more_than_the_steps_under_way(self, depth, barrier):
        async with engine(step_seconds=STEP_SECONDS, max_in_flight_steps=depth) as client:
            await barrier.wait()
            task = asyncio.create_task(collect(client, make_request(max_tokens=900)))
            await asyncio.sleep(0.1)
            task.cancel()
            start = time.monotonic()
        assert time.monotonic() - start < (depth + 1) * STEP_SECONDS + 1.0


async def test_a_full_queue_refuses():
    async with engine(step_seconds=0.05, max_num_seqs=1, max_num_queued_reqs=1) as client:
        tasks = []
        for name in "ab":
            tasks.append(asyncio.create_task(collect(client, make_request(name, max_tokens=20))))
            await asyncio.sleep(0.15)
        with pytest.raises(Overloaded, match="max_num_queued_reqs") as caught:
            await collect(client, make_request("c"))
        assert caught.value.code == "server_overloaded"
        for task in tasks:
            task.cancel()


async def test_a_request_that_waited_in_vain_hears_so():
    log = StepLog()
    client = ProcessEngineClient(
        partial(build_shedding_engine, step_seconds=0.02, max_num_seqs=1), observers=[log]
    )
    async with client:
        busy = asyncio.create_task(collect(client, make_request(max_tokens=40)))
        await asyncio.sleep(0.05)
        request = make_request("late", slo=SLO(ttft=0.2), shed=ShedMode.REJECT)
        [delivery] = [each async for each in client.generate(request)]
        assert delivery.output.finish_reason is FinishReason.EXPIRED
        assert delivery.output.error == "its TTFT objective passed in the queue"
        assert request.arrival + 0.2 < delivery.time < request.arrival + 0.4
        tokens, _ = await busy
        assert len(tokens) == 40
    states = [message.stats.scheduler for message in log.messages if message.stats is not None]
    assert all(state.decode_slacks == [0.5] for state in states)


async def test_an_engine_of_several_says_how_it_stands_also_when_idle():
    log = StepLog()
    build = partial(build_fake_engine, step_seconds=0.001, reports_load=True)
    async with ProcessEngineClient(build, observers=[log]) as client:
        await until(lambda: log.messages)
        start = log.messages[0]
        assert (start.outputs, start.load.num_taken, start.load.tightest_tbt) == ([], 0, math.inf)
        assert start.load.costs.token > 0
        with pytest.raises(PromptTooLong):
            await collect(client, make_request("long", num_prompt=2000))
        await until(lambda: log.messages[-1].load.num_taken == 1)
        await collect(client, make_request("a", max_tokens=5))
        assert [message.load.num_taken for message in log.messages[-5:]] == [2] * 5
        assert [message.load.num_running for message in log.messages[-5:]] == [1] * 4 + [0]
        stream = client.generate(make_request("b", max_tokens=900))
        await anext(stream)
        await stream.aclose()
        await until(lambda: log.messages[-1].load.num_running == 0)
        assert log.messages[-1].load.num_taken == 3


def processor_seconds(process_id: int) -> float:
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def test_an_engine_that_waits_for_another_sleeps():
    async with engine(keeps_kv=True, max_num_seqs=1) as client:
        client._send(OpenKV(b"k" * 32))
        client._send(AskMove(MoveTask("m1", MoveVerb.RESERVE, "elsewhere", num_tokens=16)))
        task = asyncio.create_task(collect(client, make_request()))
        await asyncio.sleep(0.1)
        before = processor_seconds(client.process_id)
        await asyncio.sleep(0.5)
        assert not task.done(), "the only slot is kept for a request from elsewhere"
        assert processor_seconds(client.process_id) - before < 0.2
        client._send(AskMove(MoveTask("m1", MoveVerb.RELEASE, "elsewhere")))
        tokens, _ = await task
        assert len(tokens) == 8
