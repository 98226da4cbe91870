"""What the middleware makes of requests, and what it shows; its answers are in `test_answers`."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from starlette.datastructures import Headers

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.server.slo_defaults import SLODefaults
from onbeat.vllm.objectives import ROUTES, KnownCaller, read, read_request
from onbeat.vllm.telemetry import StepTimes
from onbeat.vllm.verdicts import ClientRequest
from tests.cpu.vllm.vllm_app import (
    ASK,
    CHAT,
    MESSAGES,
    REFUSED,
    VLLMApp,
    chat_stream,
    chat_whole,
    client_of,
)

KEY_HASH = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"  # of "test"


@pytest.fixture
def classes(tmp_path):
    path = tmp_path / "classes.yaml"
    path.write_text(
        "classes:\n  - {name: chat, ttft_ms: 800, weight: 2, shed: true}\n"
        f"api_keys:\n  - {{key_sha256: {KEY_HASH}, class: chat}}\n"
    )
    return {"classes": str(path), "class": "standard"}


def held_to(app: VLLMApp):
    """Return what the engine makes of the newest request."""
    return read(app.bodies[-1]["vllm_xargs"], SLODefaults())


@pytest.mark.parametrize("path", sorted(ROUTES))
async def test_every_route_states_objectives_to_the_engine(path):
    app = VLLMApp(lambda _: chat_whole())
    reply = await client_of(app).post(path, json={**ASK, "vllm_xargs": {"k": 1}, "unknown": [1]})
    assert reply.status_code == 200
    assert held_to(app).slo == SLO(ttft=0.5, tbt=0.05)
    assert app.bodies[0]["unknown"] == [1]
    assert app.bodies[0]["vllm_xargs"]["k"] == 1
    assert "slo" not in app.bodies[0]


@pytest.mark.parametrize(
    ("more", "headers", "ttft", "slo_class"),
    [
        ({}, {}, 2.0, "standard"),
        ({}, {"x-llm-d-slo-ttft-ms": "700"}, 0.7, "standard"),
        ({}, {"x-slo-ttft-ms": "700", "x-slo-tpot-ms": "9"}, 0.7, "standard"),
        ({"slo": {"ttft_ms": 600}}, {"x-llm-d-slo-ttft-ms": "700"}, 0.6, "standard"),
        ({"service_tier": "priority"}, {}, 0.5, "interactive"),
        ({"slo": {"class": "chat"}, "service_tier": "flex"}, {}, 0.8, "chat"),
        ({"vllm_xargs": {"slo_ttft_ms": 300}}, {}, 0.3, "standard"),
        (
            {"vllm_xargs": {"slo_ttft_ms": 300, "slo_id": "mine"}, "slo": {"ttft_ms": 900}},
            {},
            0.9,
            "standard",
        ),
        ({"metadata": {"slo_ttft_ms": "400"}}, {}, 0.4, "standard"),
        ({}, {"authorization": "Bearer test"}, 0.8, "chat"),
        ({}, {"authorization": "Bearer EMPTY"}, 2.0, "standard"),
    ],
)
async def test_the_first_that_states_a_value_counts_as_in_our_own_server(
    more, headers, ttft, slo_class, classes
):
    app = VLLMApp(lambda _: chat_whole())
    body = {"model": "m", "messages": [], **more}
    assert (await client_of(app, classes).post(CHAT, json=body, headers=headers)).status_code == 200
    assert (held_to(app).slo.ttft, held_to(app).slo_class) == (ttft, slo_class)


@pytest.mark.parametrize(
    ("more", "headers", "param"),
    [
        ({"slo": {"ttft_ms": 0}}, {}, "slo.ttft_ms"),
        ({"slo": {"tftt_ms": 5}}, {}, "slo.tftt_ms"),
        ({"slo": 5}, {}, "slo"),
        ({"slo": {"weight": 99}}, {}, "slo.weight"),
        ({"slo": {"class": "gold"}}, {}, "slo.class"),
        ({"ttft_ms": 5}, {}, "ttft_ms"),
        ({"service_tier": "gold"}, {}, "service_tier"),
        ({"vllm_xargs": 5}, {}, "vllm_xargs"),
        ({"vllm_xargs": {"slo_weight": 99}}, {}, "slo.weight"),
        ({}, {"x-llm-d-slo-ttft-ms": "-1"}, "x-llm-d-slo-ttft-ms"),
        ({"slo": {"ttft_ms": 5}}, {"x-slo-tpot-ms": "inf"}, "x-slo-tpot-ms"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
async def test_wrong_objectives_never_reach_vllm(more, headers, param, path):
    app = VLLMApp(lambda _: chat_whole())
    if path == MESSAGES and "service_tier" in more:  # whose tiers are Anthropic's
        return
    client = client_of(app, allowed_origins=["*"], allowed_methods=["*"], allow_credentials=False)
    reply = await client.post(path, json={"model": "m", **more}, headers={**headers, "origin": "http://a"})
    assert (reply.status_code, app.bodies) == (400, [])
    assert reply.headers["access-control-allow-origin"] == "*"
    assert reply.json()["error"]["param"].startswith(param)
    assert (reply.json().get("type") == "error") == (path == MESSAGES)


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'"x"', b'{"a": NaN}', b"\xff"])
async def test_a_body_that_is_no_object_is_vllms_to_refuse(raw):
    app = VLLMApp(lambda _: chat_whole())
    reply = await client_of(app).post(CHAT, content=raw)
    assert reply.status_code == (200 if raw in (b"[1]", b'"x"', b'{"a": NaN}') else 400)


async def test_bodies_are_bounded():
    app, settings = VLLMApp(lambda _: chat_whole()), {"max_body_bytes": 1000}
    whole = await client_of(app, settings).post(CHAT, content=b"x" * 1001)

    async def pieces():
        for _ in range(11):
            yield b"x" * 100

    cut = await client_of(app, settings).post(CHAT, content=pieces())
    assert (whole.status_code, cut.status_code, app.headers) == (413, 413, [])


async def test_keys_are_tenants_where_the_server_asks_for_them():
    app = VLLMApp(lambda _: chat_whole())
    headers = {"authorization": "Bearer k", "x-llm-d-inference-fairness-id": "t"}
    reply = await client_of(app, api_key=["k"]).post(CHAT, json=ASK, headers=headers)
    assert held_to(app).tenant.startswith("key:")
    assert reply.headers["x-onbeat-ignored-fields"] == "x-llm-d-inference-fairness-id"
    await client_of(app).post(CHAT, json=ASK, headers=headers)
    assert held_to(app).tenant == "t"


async def test_other_paths_are_left_alone():
    app = VLLMApp(lambda _: chat_whole())
    await client_of(app).post("/v1/embeddings", json=ASK)
    assert app.bodies == [ASK]


async def numbers_of(client) -> dict[str, float]:
    text = (await client.get("/metrics")).text
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("onbeat_")]
    return {name: float(value) for name, _, value in lines if "_created" not in name}


async def test_four_numbers_are_among_vllms_metrics():
    app = VLLMApp(lambda body: (503, {"error": {"message": REFUSED}}) if "n" in body else chat_stream())

    def slowly(data: bytes) -> list[bytes]:
        time.sleep(0.01)
        return [data]

    app.cut = slowly
    client = client_of(app)
    for more in ({"slo": {"ttft_ms": 5000}}, {"slo": {"ttft_ms": 1}}, {}, {"n": 1}):
        await client.post(CHAT, json={"stream": True, **more})
    client.shared.requests.take(StepTimes(rank=1, predicted=0.5, measured=2.0))
    assert await numbers_of(client) == {
        "onbeat_slo_attainment": 0.5,
        "onbeat_requests_late": 0.0,
        'onbeat_requests_rejected_total{reason="slo_unattainable"}': 1.0,
        'onbeat_step_time_ratio{rank="1"}': 0.25,
    }


@pytest.mark.parametrize(
    ("slo", "mode", "deliveries", "due"),
    [
        ({"ttft_ms": 500}, "stream", [], 0.5),
        ({"ttft_ms": 500, "tbt_ms": 100}, "stream", [0.2, 0.3], 0.7),
        ({"tbt_ms": 100}, "stream", [0.2, 0.3], 0.4),
        ({"tbt_ms": 100}, "gap", [0.2, 0.25], 0.35),
        ({"ttft_ms": 500, "e2e_ms": 600}, "stream", [0.2], 0.6),
    ],
)
def test_a_request_is_late_when_its_next_token_is_overdue(slo, mode, deliveries, due):
    body = json.dumps({"stream": True, "slo": slo}).encode()
    request = read_request(CHAT, body, Headers(), KnownCaller(), SLODefaults(), slo_id="x")
    opened = ClientRequest(request, 0.0, mode)
    for now in deliveries:
        opened.deliver(0, now)
    assert (opened.is_late(due - 1e-6), opened.is_late(due + 1e-6)) == (False, True)
    opened.finish(0, "stop")
    assert not opened.is_late(10.0)


async def test_a_client_that_leaves_is_not_judged():
    async def never(_scope, _receive, _send) -> None:
        await asyncio.sleep(3600)

    client = client_of(never)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.post(CHAT, json=ASK), 0.05)
    requests = client.shared.requests
    assert not requests._verdicts
    assert not requests._open


async def test_a_wrong_configuration_ends_the_start_and_an_end_closes_what_was_opened(tmp_path):
    async def app(_scope, _receive, _send) -> None:
        pass

    async def start(settings) -> object:
        client = client_of(app, settings)
        await client.served({"type": "lifespan"}, None, None)
        return client.shared

    with pytest.raises(ConfigError, match=r"tftt_ms.*ttft_ms"):
        await start({"tftt_ms": 5})
    shared = await start({"telemetry": f"ipc://{tmp_path}/t"})
    assert shared._hearing.cancelling()
