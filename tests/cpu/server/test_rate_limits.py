"""Rate limits of API keys: buckets on a clock of the test, and refusals over a real socket."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.server.rate_limits import RATE_HEADERS, Bucket, KeyMeter
from onbeat.server.slo_defaults import KeyDefaults, KeyLimits, SLODefaults, key_digest
from tests.cpu.server.asking import CHAT
from tests.cpu.server.running import HELLO, Answer, Served
from tests.examples import examples
from tests.fakes_engine import FakeEngine
from tests.waiting import until

EMBED = "/v1/embeddings"
OTHER = {"authorization": "Bearer other"}


def limited(**limits: int) -> dict[str, Any]:
    keys = {key_digest("corpus"): KeyDefaults(limits=KeyLimits(**limits))}
    return {"api_keys": ("corpus", "other"), "slo": SLODefaults(keys=keys)}


async def ask(served: Served, path: str = EMBED, **fields: Any) -> Answer:
    fields = fields or ({"input": "a"} if path == EMBED else {"messages": HELLO})
    return await served.post(path, fields, headers={"authorization": "Bearer corpus"})


def check_refused(answer: Answer, limit: str) -> float:
    """Check a refusal; return the seconds after which to come again."""
    assert answer.status == 429, answer.body
    error = answer.json["error"]
    assert (error["type"], error["code"], error["limit"]) == (
        "rate_limit_error",
        "rate_limit_exceeded",
        limit,
    )
    assert int(answer.headers["retry-after"]) >= 1
    return int(answer.headers["retry-after-ms"]) / 1e3


@examples(30)
@given(st.integers(1, 500), st.lists(st.tuples(st.floats(0, 20), st.integers(1, 900)), max_size=30))
def test_whoever_waits_as_told_takes_no_more_than_a_minute_beside_the_rate(
    per_minute: int, asked: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket(per_minute, 0.0), 0.0, 0
    for pause, amount in asked:
        now += pause
        now += bucket.wait(amount, now) * 1.0000001
        assert bucket.wait(amount, now) < 1e-3
        assert taken + min(amount, per_minute) <= per_minute * (1 + now / 60) * 1.001
        bucket.take(amount)
        taken += amount


def test_tokens_that_were_not_taken_come_back() -> None:
    meter = KeyMeter(KeyLimits(tokens_per_minute=100), 0.0)
    meter.begin(80, 0.0)
    meter.end(80, 10)
    assert dict(meter.headers(0.0))["x-ratelimit-remaining-tokens"] == "90"
    meter.begin(90, 0.0)
    meter.end(90, 130)  # more than estimated: the next waits longer
    assert dict(meter.headers(0.0)) == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "84.000s",
    }


@pytest.mark.parametrize("served", [limited(requests_per_minute=2)], indirect=True)
async def test_so_many_requests_a_minute(served: Served) -> None:
    first = await ask(served)
    assert (first.status, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert (await ask(served, CHAT)).status == 200
    assert 0 < check_refused(await ask(served), "requests") <= 30
    assert (await served.post(EMBED, {"input": "a"}, headers=OTHER)).status == 200
    listed = await served.get("/v1/models", headers={"authorization": "Bearer corpus"})
    assert listed.status == 200
    metrics = (await served.get("/metrics")).body.decode()
    assert 'onbeat_rate_limited_total{limit="requests"} 1.0' in metrics


@pytest.mark.parametrize("served", [limited(tokens_per_minute=1000)], indirect=True)
async def test_so_many_tokens_a_minute(served: Served) -> None:
    assert (await ask(served, input="a" * 700)).status == 200
    refused = await ask(served, input="a" * 2000)
    check_refused(refused, "tokens")
    assert set(RATE_HEADERS) & {name.lower() for name in refused.headers} == set(RATE_HEADERS[3:])


@pytest.mark.parametrize("served", [limited(tokens_per_minute=1000)], indirect=True)
async def test_what_was_refused_for_another_reason_takes_no_tokens(served: Served) -> None:
    assert (await ask(served, input=["a"], dimensions=10**6)).status == 400
    answer = await ask(served, input="a")
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) >= 990


@pytest.mark.parametrize("served", [limited(max_open_requests=1)], indirect=True)
async def test_so_many_requests_at_once(served: Served, engine: FakeEngine) -> None:
    engine.script.first_delay = 0.5
    asking = asyncio.create_task(ask(served))
    await until(lambda: engine.requests)
    check_refused(await ask(served), "open_requests")
    assert (await asking).status == 200
    assert (await ask(served)).status == 200


@pytest.mark.parametrize("served", [limited(requests_per_minute=1)], indirect=True)
async def test_anthropics_clients_hear_of_it_in_their_form(served: Served) -> None:
    await ask(served)
    body = {"messages": HELLO, "max_tokens": 4, "model": "fake/model"}
    refused = await ask(served, "/v1/messages", **body)
    assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
