"""What the plug-in tells of requests and steps, and what others make of it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import msgspec
import pytest

from onbeat.cli.main import main
from onbeat.core.slo import Fate
from onbeat.metrics.exposition import read_exposition
from onbeat.recording.log import AddCall
from onbeat.recording.reader import Recording
from onbeat.report.live_view import ServerHistory, is_onbeat
from onbeat.simulator.replay.history import read_history
from onbeat.vllm import plugin as plugin_module
from onbeat.vllm.recorder import record
from onbeat.vllm.telemetry import stats_of
from onbeat.vllm.teller import Teller
from tests.cpu.vllm.fake_scheduler import (
    FakeRequest,
    FakeScheduler,
    add_some,
    heard_by,
    planned_scheduler,
    recorded,
    run,
)
from tests.cpu.vllm.vllm_app import (
    ASK,
    CHAT,
    VLLMApp,
    chat_chunk,
    chat_whole,
    client_of,
    data_events,
    event,
)


@pytest.fixture
def make(monkeypatch):
    return planned_scheduler(monkeypatch)


def test_each_request_and_step_is_told_of(make):
    scheduler = make()
    told = heard_by(scheduler)
    add_some(scheduler, 3, slo_id="x", slo_ttft_ms=500.0, slo_tbt_ms=50.0)
    scheduler.add_request(FakeRequest("late", 2000, 5, slo_id="y", slo_ttft_ms=1.0, slo_shed="reject"))
    scheduler.finish_requests("r2", None)
    run(scheduler)
    scheduler.shutdown()
    requests = [each for each in told if each["kind"] == "request"]
    assert [(each["event"], each["request_id"], each["id"]) for each in requests] == [
        ("added", "r0", "x"),
        ("added", "r1", "x"),
        ("added", "r2", "x"),
        ("refused", "late", "y"),
        ("aborted", "r2", "x"),
        ("scheduled", "r0", "x"),
        ("scheduled", "r1", "x"),
    ]
    assert requests[3]["status"] == 429
    assert requests[3]["predicted_ttft_ms"] > 1
    steps = [each for each in told if each["kind"] == "step"]
    assert steps[0]["rows"] == [["r0", 0, 10, True], ["r1", 0, 50, True]]
    assert [each["counts"] for each in steps] == [[1, 1]] * 10
    assert steps[-1]["finished"] == {"r0": "length", "r1": "length"}
    first, second = (stats_of(each) for each in steps[:2])
    assert first.end - first.start == pytest.approx(0.01 + 2e-4 * 60)
    assert (first.num_running, first.num_waiting, first.num_used_blocks) == (2, 0, 5)
    assert second.predicted_seconds > 0
    assert second.budget_seconds > 0
    assert second.scheduler is not None


def test_what_a_step_tells_does_not_grow_with_the_queue(make):
    sizes = []
    for num_waiting in (0, 500):
        scheduler = make()
        told = heard_by(scheduler)
        scheduler.add_request(FakeRequest("first", 10, 5))
        scheduler.now += 1e-6  # behind it
        add_some(scheduler, num_waiting)
        scheduler.max_num_scheduled_tokens = 10
        scheduler.update_from_output(scheduler.schedule(), None)
        (step,) = [each for each in told if each["kind"] == "step"]
        sizes.append(len(msgspec.msgpack.encode(step)))
    assert abs(sizes[1] - sizes[0]) < 20


def test_a_fault_in_telling_ends_the_telling_and_nothing_else(make, caplog):
    scheduler = make()

    def send(message):
        raise RuntimeError("of the socket")

    scheduler.onbeat._teller = Teller(SimpleNamespace(send=send, close=lambda: None), rank=0)
    requests = add_some(scheduler, 4)
    run(scheduler)
    assert all(request.is_finished() for request in requests)
    assert (scheduler.onbeat.num_faults, scheduler.onbeat.num_foreign) == (0, 0)
    assert caplog.text.count("telemetry has failed") == 1


def test_a_record_has_who_was_refused_and_who_waited_in_vain(make, tmp_path):
    scheduler = make()
    told = heard_by(scheduler)
    add_some(scheduler, 1, slo_ttft_ms=5000.0)
    scheduler.add_request(FakeRequest("late", 2000, 5, slo_ttft_ms=1.0, slo_shed="reject"))
    scheduler.add_request(FakeRequest("wrong", 20, 5, slo_ttft_ms=-1.0))
    waits = FakeRequest("waits", 20, 5, slo_ttft_ms=500.0, slo_shed="reject")
    waits.arrival_time = scheduler.now
    scheduler.add_request(waits)
    make.now += 2.0
    run(scheduler)
    path = tmp_path / "run.gz"
    counts = recorded(path, scheduler.onbeat.keeper, plugin_module.origin_of(None), told)
    assert counts.num_requests == 3
    calls = list(Recording(path).calls())
    (refused,) = [call.refused for call in calls if isinstance(call, AddCall) and call.refused is not None]
    assert refused.code == "slo_unattainable"
    assert refused.predicted_ttft > 0.1
    assert refused.retry_after is None, "waiting does not help"
    fates = {each.record.request_id: each.record.fate for each in read_history(Recording(path)).requests}
    assert fates == {"r0": None, "late": Fate.REJECTED, "waits": Fate.EXPIRED}
    assert main(["replay", str(path)]) == 0


async def test_steps_reach_metrics_top_and_a_record_that_replays(make, monkeypatch, tmp_path, capsys):
    address, path = f"ipc://{tmp_path}/t", tmp_path / "run.gz"
    monkeypatch.setitem(FakeScheduler.options, "telemetry", address)
    scheduler = make()
    client = client_of(VLLMApp(lambda body: chat_whole()), {"telemetry": address})
    await client.get("/metrics")  # which makes it listen
    recording = asyncio.create_task(record(path, address))
    while not path.exists():
        await asyncio.sleep(0.01)
    requests = add_some(scheduler, 12, slo_ttft_ms=5000.0)
    while scheduler.has_requests():
        output = scheduler.schedule()
        type(scheduler).now += 0.01 + 2e-4 * sum(output.num_scheduled_tokens.values())
        scheduler.update_from_output(output, None)
        await asyncio.sleep(0)
    await asyncio.sleep(0.3)
    scheduler.shutdown()
    recording.cancel()
    counts = await recording
    scrape = read_exposition((await client.get("/metrics")).text)
    client.desk.close()
    num_steps = scheduler.onbeat.num_planned
    assert scrape.value("onbeat_steps_total") == counts.num_steps == num_steps
    assert scrape.value("onbeat_step_seconds_count") == num_steps
    assert scrape.value("onbeat_step_prediction_error_ratio_count") == num_steps
    assert scrape.value("onbeat_kv_blocks") == 200
    history = ServerHistory()
    history.add(scrape, 0.0)
    assert is_onbeat(scrape)
    assert history.view(0.0).steps is not None
    replayed = read_history(Recording(path))
    assert [len(each.record.delivery_times) for each in replayed.requests] == [10] * len(requests)
    assert replayed.steps[-1].end == pytest.approx(scheduler.now)
    assert main(["replay", str(path)]) == 0
    assert "vLLM took these steps" in capsys.readouterr().out


async def test_a_killed_engine_is_said_once_and_nothing_of_its_record_is_lost(
    make, monkeypatch, tmp_path, caplog
):
    """vLLM answers 500 then, or ends its streams with an error; the middleware passes both on."""
    for name in ("middleware", "recorder"):
        monkeypatch.setattr(f"onbeat.vllm.{name}._PATIENCE", 2.0)
    monkeypatch.setattr("onbeat.vllm.telemetry.HELLO_SECONDS", 0.05)
    address, path = f"ipc://{tmp_path}/t", tmp_path / "run.gz"
    monkeypatch.setitem(FakeScheduler.options, "telemetry", address)
    scheduler = make()
    dead = {
        "error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}
    }
    stream = [chat_chunk({"role": "assistant", "content": ""}), chat_chunk({"content": "Hi"}), event(dead)]
    app = VLLMApp(lambda body: stream if body.get("stream") else (500, dead))
    client = client_of(app, {"telemetry": address})
    await client.get("/metrics")
    recording = asyncio.create_task(record(path, address))
    while not path.exists():
        await asyncio.sleep(0.01)
    add_some(scheduler, 2)
    scheduler.update_from_output(scheduler.schedule(), None)
    while read_exposition((await client.get("/metrics")).text).value("onbeat_kv_blocks") != 200:
        await asyncio.sleep(0.01)
    scheduler.onbeat._teller.close()  # it is killed
    counts = await recording
    assert (counts.has_fallen_silent, counts.num_requests, counts.num_steps) == (True, 2, 1)
    assert len(read_history(Recording(path)).steps) == 1
    reply = await client.post(CHAT, json=ASK)
    assert (reply.status_code, reply.json()) == (500, dead)
    reply = await client.post(CHAT, json={**ASK, "stream": True})
    assert (reply.status_code, data_events(reply.content)[-1]) == (200, dead)
    while "so it has ended or hangs" not in caplog.text:
        await asyncio.sleep(0.01)
    scrape = read_exposition((await client.get("/metrics")).text)
    client.desk.close()
    assert caplog.text.count("so it has ended or hangs: its gauges are 0") == 1
    assert scrape.value("onbeat_kv_blocks") == 0
    assert scrape.value("onbeat_requests_total", finish_reason="error") == 2
