"""Heads, logs, metrics, names and probes."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import datetime

import pytest

from tests.cpu.server.asking import CHAT, ask_chat
from tests.cpu.server.running import HELLO, Served, serving
from tests.fakes_engine import FakeEngine

LAG = "onbeat_event_loop_lag_seconds"


async def test_an_answer_says_nothing_of_refusals(served: Served) -> None:
    message = (await ask_chat(served))["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "Hello, world!"}


async def test_request_ids_are_echoed_or_made(served: Served) -> None:
    given = await served.get("/health", headers={"x-request-id": "abc-1.2:3"})
    assert given.headers["x-request-id"] == "abc-1.2:3"
    for bad in ("a b", "x" * 129, "<script>"):
        made = await served.get("/health", headers={"x-request-id": bad})
        assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])


async def test_processing_time_is_in_the_headers(served: Served, engine: FakeEngine) -> None:
    engine.script.first_delay = 0.05
    answer = await served.post(CHAT, {"messages": HELLO})
    assert 50 <= int(answer.headers["openai-processing-ms"]) < 5000


async def test_one_line_is_logged_per_request(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "onbeat.server"):
        await served.post(CHAT, {"messages": HELLO}, headers={"x-request-id": "me"})
    (line,) = [record.message for record in caplog.records if record.name == "onbeat.server"]
    assert line.startswith("me POST /v1/chat/completions 200 id=chatcmpl-")
    assert "prompt_tokens=20 output_tokens=14 ttft_ms=" in line
    assert line.endswith("finish=stop")


async def test_the_request_log_can_be_switched_off(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "onbeat.server"):
        async with serving(engine, log_requests=False) as served:
            await served.post(CHAT, {"messages": HELLO})
    assert not [record for record in caplog.records if record.name == "onbeat.server"]


async def test_what_is_asked_often_is_logged_only_for_debugging(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "onbeat.server"):
        await served.get("/health")
        await served.get("/metrics")
        await served.get("/version")
        await served.post("/tokenize", {"prompt": "a"})
        await served.post("/detokenize", {"tokens": [1]})
        await served.post("/tokenize", {"prompt": 3})
    lines = [record.message for record in caplog.records if record.name == "onbeat.server"]
    assert [line.split()[2:4] for line in lines] == [["/version", "200"], ["/tokenize", "400"]]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/embeddings", "/v1/embeddings"),
        ("/completion", "/v1/completions"),
        ("/healthz", "/health"),
        ("/infill", None),
        ("/v1/files/" + "x" * 5000, None),
    ],
)
async def test_a_path_that_resembles_another_says_so(served: Served, path: str, meant: str | None) -> None:
    answer = await served.post(path, {})
    assert (answer.status, answer.error["code"]) == (404, "not_found")
    message = answer.error["message"]
    assert (f"did you mean {meant}?" if meant else "lists all") in message
    assert ("did you mean" in message) == bool(meant)
    assert len(message) < 250
    adapters = await served.post("/v1/load_lora_adapter", {})
    assert (adapters.status, "--enable-lora" in adapters.error["message"]) == (404, True)


async def test_served_names(engine: FakeEngine) -> None:
    async with serving(engine, served_model_names=("gpt", "alias")) as served:
        models = (await served.get("/v1/models")).json
        assert [model["id"] for model in models["data"]] == ["gpt", "alias"]
        assert models["data"][0]["root"] == "fake/model"
        assert (models["has_more"], models["first_id"], models["last_id"]) == (False, "gpt", "alias")
        card = (await served.get("/v1/models/alias", headers={"anthropic-version": "2023-06-01"})).json
        assert (card["type"], card["display_name"]) == ("model", "alias")
        assert datetime.fromisoformat(card["created_at"]).timestamp() == card["created"]
        assert (await ask_chat(served))["model"] == "gpt"
        assert (await ask_chat(served, model="alias"))["model"] == "alias"
        assert (await served.post(CHAT, {"messages": HELLO, "model": "fake/model"})).status == 404


async def test_metrics_show_a_stall_of_the_event_loop(served: Served) -> None:
    async def lag() -> tuple[int, float]:
        text = (await served.get("/metrics")).body.decode()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(LAG))
        is_long = float(values[LAG + "_count"]) - float(values[LAG + '_bucket{le="0.2"}'])
        return int(is_long), float(values[LAG + "_sum"])

    num_before, before = await lag()
    time.sleep(0.4)
    await asyncio.sleep(0.01)
    num_after, after = await lag()
    assert num_after > num_before
    assert after - before >= 0.3


async def test_metrics_count_the_requests(served: Served) -> None:
    await ask_chat(served)
    await served.get("/nowhere")
    text = (await served.get("/metrics")).body.decode()
    for line in (
        'onbeat_requests_total{finish_reason="stop"} 1.0',
        'onbeat_http_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0',
        'onbeat_http_requests_total{endpoint="unmatched",status="404"} 1.0',
        "onbeat_output_tokens_total 14.0",
        "onbeat_time_to_first_token_seconds_count 1.0",
    ):
        assert line in text


async def test_the_state_has_the_metrics_as_numbers(served: Served) -> None:
    await ask_chat(served)
    state = (await served.get("/state")).json
    assert (state["requests_total"]["stop"], state["output_tokens_total"]) == (1, 14)
    assert sum(state["time_to_first_token_seconds"]["counts"]) == 1
    assert state["unix_time"] >= state["start_time"]


@pytest.mark.parametrize("served", [{"metrics_aliases": "vllm"}], indirect=True)
async def test_vllms_metric_of_the_cache(served: Served) -> None:
    text = (await served.get("/metrics")).body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    info = served.engine.info
    assert f'kv_cache_size_tokens="{info.limits.num_blocks * info.limits.block_size}"' in line
    assert line.endswith(" 1.0")


async def test_small_endpoints(served: Served, engine: FakeEngine) -> None:
    assert (await served.get("/health")).body == b""
    assert (await served.get("/ping")).status == (await served.get("/ready")).status == 200
    assert (await served.get("/version")).json.keys() == {"version"}
    assert (await served.get("/load")).json == {"server_load": 0}
    assert b"swagger" in (await served.get("/docs")).body


@pytest.mark.parametrize("path", ["/health", "/ping", "/ready"])
async def test_probes_may_ask_for_the_head_alone(served: Served, engine: FakeEngine, path: str) -> None:
    for is_alive, status in ((True, 200), (False, 503)):
        engine.is_alive = is_alive
        got = await served.get(path)
        async with served.session.head(served.url + path) as head:
            assert head.status == got.status == status
            assert await head.read() == b""
            assert head.headers["content-length"] == got.headers["content-length"]


async def test_curl_streams(served: Served) -> None:
    body = '{"messages":[{"role":"user","content":"hi"}],"stream":true}'
    arguments = ("-sN", "-H", "content-type: application/json", "-d", body, served.url + CHAT)
    process = await asyncio.create_subprocess_exec("curl", *arguments, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert process.returncode == 0
    assert out.endswith(b"data: [DONE]\n\n")
