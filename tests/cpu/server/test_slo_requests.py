"""Objectives over HTTP: what the engine gets, and what is refused at the edge."""

from __future__ import annotations

import re
from typing import Any

import pytest

from onbeat.core.slo import SLO, SLO_CLASSES, ShedMode
from onbeat.server.slo_defaults import SLODefaults, key_digest
from tests.cpu.server.running import HELLO, Answer, Served
from tests.fakes_engine import FakeEngine
from tests.many_cases import each_case

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": ["a", "b"]}}


async def ask(served: Served, path: str, fields: dict[str, Any], headers: dict[str, str]) -> Answer:
    return await served.post(path, {**BODIES[path], **fields}, headers=headers)


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_every_choice_carries_the_objectives(served: Served, engine: FakeEngine, path: str) -> None:
    slo = {"ttft_ms": 700, "e2e_ms": 9000, "class": "interactive", "weight": 0.5, "shed": True}
    headers = {"x-llm-d-slo-tpot-ms": "35", "x-llm-d-inference-fairness-id": "team-a"}
    answer = await ask(served, path, {"slo": slo, "n": 2}, headers)
    assert answer.status == 200, answer.body
    assert len(engine.requests) == (2 if path == CHAT else 4)
    for request in engine.requests:
        assert request.slo == SLO(ttft=0.7, tbt=0.035, e2e=9.0)
        assert (request.slo_class, request.weight, request.tenant) == ("interactive", 0.5, "team-a")
        assert request.shed is ShedMode.REJECT


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_request_without_objectives_has_none(served: Served, engine: FakeEngine, path: str) -> None:
    answer = await ask(served, path, {"service_tier": "auto", "slo": None}, {})
    assert answer.status == 200
    assert "slo" not in answer.json
    assert [(request.slo, request.slo_class) for request in engine.requests] == [(None, None)] * len(
        engine.requests
    )


@pytest.mark.parametrize(
    "served", [{"slo": SLODefaults(slo_class="batch", shed=ShedMode.OFF)}], indirect=True
)
async def test_the_servers_defaults_reach_the_engine(served: Served, engine: FakeEngine) -> None:
    await ask(served, CHAT, {}, {})
    await ask(served, CHAT, {"service_tier": "priority"}, {})
    assert [request.slo for request in engine.requests] == [SLO_CLASSES["batch"], SLO_CLASSES["interactive"]]
    assert {request.shed for request in engine.requests} == {ShedMode.OFF}


BAD_FIELDS = [
    *(
        ({"slo": {"ttft_ms": value}}, "slo.ttft_ms")
        for value in (0, 0.5, -1, 86_400_001, True, "soon", "0", [1])
    ),
    *(({"slo": {name: 0}}, f"slo.{name}") for name in ("tbt_ms", "e2e_ms", "weight")),
    *(({"slo": {"weight": value}}, "slo.weight") for value in (-1, 1001, "high", False)),
    ({"slo": {"shed": 1}}, "slo.shed"),
    ({"slo": {"shed": "yes"}}, "slo.shed"),
    ({"slo": {"class": 5}}, "slo.class"),
    ({"slo": {"class": "interactiv"}}, "slo.class"),
    ({"slo": "interactive"}, "slo"),
    ({"slo": []}, "slo"),
    ({"service_tier": "fast"}, "service_tier"),
    ({"user": 5}, "user"),
]


@each_case("path", [CHAT, TEXT])
@each_case(("fields", "param"), BAD_FIELDS)
async def test_wrong_fields_are_named(
    served: Served, engine: FakeEngine, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = await ask(served, path, fields, {})
    assert answer.status == 400, answer.body
    error = answer.error
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error",
        "invalid_value",
        param,
    )
    assert engine.requests == []


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999", b"-Infinity"])
async def test_numbers_that_json_lacks_are_refused(served: Served, number: bytes) -> None:
    body = b'{"prompt": "a", "slo": {"ttft_ms": ' + number + b"}}"
    answer = await served.post(TEXT, data=body, headers={"content-type": "application/json"})
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


@pytest.mark.parametrize(
    ("key", "cure"),
    [
        ("ttft", "mean 'ttft_ms'?"),
        ("tpot_ms", "mean 'tbt_ms'?"),
        ("slo_class", "mean 'class'?"),
        ("urgency", "e2e_ms, job, shed, tbt_ms, ttft_ms,"),
    ],
)
async def test_unknown_keys_get_a_near_match(served: Served, key: str, cure: str) -> None:
    answer = await ask(served, CHAT, {"slo": {key: 100}}, {})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("unknown_parameter", f"slo.{key}")
    assert cure in answer.error["message"]


@each_case("path", [CHAT, TEXT])
@each_case(
    ("name", "meant"),
    [("ttft_ms", "slo.ttft_ms"), ("tpot_ms", "slo.tbt_ms"), ("e2e_ms", "slo.e2e_ms")],
)
async def test_an_objective_outside_of_slo_is_refused(
    served: Served, path: str, name: str, meant: str
) -> None:
    answer = await ask(served, path, {name: 500}, {})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (400, "unknown_parameter", name)
    assert f"mean {meant!r}?" in answer.error["message"]


async def test_an_unknown_class_lists_those_there_are(served: Served) -> None:
    answer = await ask(served, CHAT, {"slo": {"class": "interactiv"}}, {})
    message = answer.error["message"]
    assert re.search("mean 'interactive'.* batch, interactive, offline, standard", message)


@each_case("path", [CHAT, TEXT])
@each_case("name", ["x-llm-d-slo-ttft-ms", "X-LLM-D-SLO-TPOT-MS", "x-slo-tpot-ms"])
@each_case("value", ["0", "-1", "18446744073709551615", "soon", ""])
async def test_wrong_headers_are_named_and_never_urgent(
    served: Served, engine: FakeEngine, path: str, name: str, value: str
) -> None:
    answer = await ask(served, path, {}, {name: value})
    assert answer.status == 400
    assert (answer.error["param"], answer.error["code"]) == (name.lower(), "invalid_value")
    assert engine.requests == []


async def test_a_tenant_has_a_longest_name(served: Served) -> None:
    answer = await ask(served, CHAT, {}, {"x-llm-d-inference-fairness-id": "t" * 129})
    assert (answer.status, answer.error["param"]) == (400, "x-llm-d-inference-fairness-id")


async def test_without_keys_the_key_that_clients_make_up_is_nobody(
    served: Served, engine: FakeEngine
) -> None:
    assert (await ask(served, CHAT, {}, {"authorization": "Bearer none"})).status == 200
    assert engine.requests[0].tenant is None


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("served", [{"api_keys": ("a", "b")}], indirect=True)
async def test_nobody_takes_the_share_of_another_key(served: Served, engine: FakeEngine, path: str) -> None:
    for key, name in (("a", ""), ("b", ""), ("b", "new"), ("b", f"key:{key_digest('a')[:16]}")):
        headers = {"authorization": f"Bearer {key}", "x-llm-d-inference-fairness-id": name}
        answer = await ask(served, path, {}, headers)
        assert answer.status == 200
        told = {"x-onbeat-ignored-fields": "x-llm-d-inference-fairness-id"} if name else {}
        assert answer.headers.items() >= told.items(), "it is said that the name does not count"
    num_each = len(engine.requests) // 4
    tenants = [request.tenant for request in engine.requests[::num_each]]
    assert tenants == [tenants[0], tenants[1], tenants[1], tenants[1]]
    assert tenants[0] != tenants[1]


async def test_a_weight_above_the_bound_is_refused_and_the_bound_named(served: Served) -> None:
    answer = await ask(served, CHAT, {"slo": {"ttft_ms": 3000, "weight": 1000}}, {})
    assert (answer.status, answer.error["param"], answer.error["code"]) == (
        400,
        "slo.weight",
        "invalid_value",
    )
    assert "at most 1" in answer.error["message"]
    assert "--slo-classes" in answer.error["message"]


@pytest.mark.parametrize("served", [{"api_keys": ("very-secret",)}], indirect=True)
async def test_keys_stay_out_of_log_metrics_and_engine(
    served: Served, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    headers = {"authorization": "Bearer very-secret"}
    assert (await ask(served, CHAT, {"user": "alice@example.org"}, headers)).status == 200
    assert engine.requests[0].tenant is not None
    told = [caplog.text, (await served.get("/metrics")).body.decode(), engine.requests[0].tenant]
    assert not any("very-secret" in text or "alice" in text for text in told)


async def test_headers_that_resemble_those_of_objectives_are_named_as_ignored(served: Served) -> None:
    headers = {"x-slo-ttft-ms": "900", "x-slo-class": "batch", "x-llm-d-slo-e2e-ms": "5", "x-other": "1"}
    answer = await served.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    ignored = answer.headers["x-onbeat-ignored-fields"].split(", ")
    assert (answer.status, sorted(ignored)) == (200, ["x-llm-d-slo-e2e-ms", "x-slo-class"])
