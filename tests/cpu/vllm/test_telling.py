"""What the plug-in tells of requests and steps, and what clients see of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from onbeat.core.slo import SLO, ShedMode
from onbeat.server.objectives import RequestObjectives
from onbeat.vllm.objectives import as_extra_args
from onbeat.vllm.telemetry import RequestNews, StepTimes
from onbeat.vllm.verdicts import STEP_TIME_RATIO
from tests.cpu.vllm.fake_scheduler import (
    FakeRequest,
    FakeScheduler,
    add_some,
    heard_by,
    planned_scheduler,
    run,
)
from tests.cpu.vllm.vllm_app import ASK, CHAT, VLLMApp, chat_chunk, chat_whole, client_of, data_events, event


def held(slo_id: str, ttft: float, shed: ShedMode):
    return as_extra_args(RequestObjectives(slo=SLO(ttft=ttft), shed=shed), slo_id)


@pytest.fixture
def make(monkeypatch):
    return planned_scheduler(monkeypatch)


def test_what_becomes_of_a_request_is_told_by_the_middlewares_name(make):
    scheduler = make()
    told = heard_by(scheduler)
    add_some(scheduler, 1, **held("x", 5.0, ShedMode.OFF))
    scheduler.add_request(FakeRequest("late", 2000, 5, **held("y", 1e-3, ShedMode.REJECT)))
    scheduler.add_request(FakeRequest("later", 2000, 5, **held("z", 1e-3, ShedMode.RELEGATE)))
    scheduler.add_request(FakeRequest("own", 2000, 5, slo_ttft_ms=1.0, slo_shed="reject"))
    run(scheduler)
    news = {each.slo_id: each for each in told if isinstance(each, RequestNews)}
    assert news.keys() <= {"x", "y", "z"}
    assert news["y"].refusal.code == "slo_unattainable"
    assert news["y"].refusal.predicted_ttft > 1e-3
    assert news["z"].is_relegated
    assert all(not each.is_relegated for each in told if getattr(each, "slo_id", "") == "x")


def test_step_times_are_told_beside_their_predictions(make):
    scheduler = make()
    told = heard_by(scheduler)
    scheduler.add_request(FakeRequest("long", 10, 120))
    run(scheduler)
    times = [each for each in told if isinstance(each, StepTimes)]
    assert len(times) == 2
    assert times[0].measured == pytest.approx(0.5 + 2e-4 * (10 + 49))
    assert times[1].predicted == pytest.approx(times[1].measured, rel=0.1)


async def test_what_the_scheduler_predicts_is_in_the_verdict(make, monkeypatch, tmp_path):
    address = f"ipc://{tmp_path}/t"
    monkeypatch.setitem(FakeScheduler.options, "telemetry", address)
    scheduler = make()

    async def served(body):
        name = f"r{len(scheduler.requests)}-{scheduler.now}"
        request = FakeRequest(name, 20, 60, **body["vllm_xargs"])
        request.arrival_time = scheduler.now
        scheduler.add_request(request)
        run(scheduler)
        while not any(each.predicted_ttft for each in client.shared.requests._open.values()):
            await asyncio.sleep(0.01)  # the scheduler's word is under way

    app = VLLMApp(lambda _: chat_whole())

    async def engine(scope, receive, send):
        if scope["path"] == CHAT:
            message = await receive()
            await served(json.loads(message["body"]))

            async def again():
                return message

            receive = again
        await app(scope, receive, send)

    client = client_of(engine, {"telemetry": address})
    await client.get("/metrics")  # which makes it listen
    while not STEP_TIME_RATIO._metrics:  # who subscribes late misses what was sent before
        scheduler.onbeat._publisher.send(StepTimes(rank=0, predicted=1.0, measured=1.0))
        await asyncio.sleep(0.01)
    reply = await client.post(CHAT, json={**ASK, "slo": {"ttft_ms": 5000, "shed": True}})
    verdict = reply.json()["slo"]
    assert verdict["predicted_ttft_ms"] > 0
    assert float(reply.headers["x-onbeat-predicted-ttft-ms"]) == pytest.approx(
        verdict["predicted_ttft_ms"], abs=0.1
    )
    text = (await client.get("/metrics")).text
    assert 'onbeat_step_time_ratio{rank="0"}' in text
    client.shared.close()
    scheduler.shutdown()


async def test_what_vllm_says_of_a_dead_engine_gets_through():
    dead = {
        "error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}
    }
    stream = [chat_chunk({"role": "assistant", "content": ""}), chat_chunk({"content": "Hi"}), event(dead)]
    client = client_of(VLLMApp(lambda body: stream if body.get("stream") else (500, dead)))
    reply = await client.post(CHAT, json=ASK)
    assert (reply.status_code, reply.json()) == (500, dead)
    reply = await client.post(CHAT, json={**ASK, "stream": True})
    assert (reply.status_code, data_events(reply.content)[-1]) == (200, dead)
