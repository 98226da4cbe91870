"""Rate limits of API keys: buckets on a clock of the test, and refusals over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.server.errors import ApiError
from onbeat.server.rate_limits import BYTES_PER_TOKEN, RATE_HEADERS, KeyAllowance, KeyMeter, TokenBucket
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
@given(st.integers(1, 500), st.lists(st.tuples(st.floats(0, 20), st.floats(0, 2)), max_size=30))
def test_whoever_waits_as_told_takes_no_more_than_a_minute_beside_the_rate(
    per_minute: int, asked: list[tuple[float, float]]
) -> None:
    bucket, now, taken = TokenBucket(per_minute, 0.0), 0.0, 0.0
    for pause, minutes in asked:
        amount = minutes * per_minute
        now += pause
        now += bucket.wait(amount, now) * 1.0000001
        assert bucket.wait(amount, now) < 1e-3
        assert taken + min(amount, per_minute) <= per_minute * (1 + now / 60) * 1.001
        bucket.take(amount)
        taken += amount


def meter_of(**limits: int) -> KeyMeter:
    return KeyMeter(KeyLimits(**limits), 0.0, on_limited=lambda _: None)


class TestAllowance:
    def begin(self, meter: KeyMeter, num_tokens: int = 1) -> KeyAllowance:
        return KeyAllowance(meter, BYTES_PER_TOKEN * num_tokens, lambda: 0.0)

    def end(self, allowance: KeyAllowance, num_tokens: int, status: int = 200) -> None:
        allowance.end(status, 0, num_tokens)

    def left(self, meter: KeyMeter, now: float = 0.0) -> tuple[str, str]:
        told = dict(meter.headers(now))
        return told["x-ratelimit-remaining-tokens"], told["x-ratelimit-reset-tokens"]

    def test_what_an_answer_may_have_is_taken_before_it_begins_and_the_rest_comes_back(self) -> None:
        meter = meter_of(tokens_per_minute=100)
        allowance = self.begin(meter, 80)
        allowance.take_answers(20, [30, 30])
        assert self.left(meter) == ("20", "48.000s")
        with pytest.raises(ApiError) as caught:
            self.begin(meter, 21)
        assert caught.value.headers["retry-after-ms"] == "600"
        self.end(allowance, 10)
        assert self.left(meter) == ("90", "6.000s")

    def test_the_debt_is_a_minute_at_most(self) -> None:
        meter = meter_of(tokens_per_minute=100)
        allowance = self.begin(meter)
        allowance.take_answers(10, [5000], is_stated=False)  # whose usual length is above the limit
        self.end(allowance, 5010)
        assert self.left(meter) == ("0", "120.000s")
        assert self.left(meter, 60.6)[0] == "1"

    def test_more_than_two_minutes_never_fit(self) -> None:
        meter = meter_of(tokens_per_minute=100, max_open_requests=4)
        allowance = self.begin(meter)
        for max_tokens in ([191], [1] * 5):
            with pytest.raises(ApiError) as caught:
                allowance.take_answers(10, max_tokens)
            assert caught.value.headers == {"x-should-retry": "false"}
        allowance.take_answers(10, [190])
        assert self.left(meter) == ("0", "120.000s")

    def test_answers_without_a_bound_are_taken_as_long_as_they_have_been(self) -> None:
        meter = meter_of(tokens_per_minute=10_000)
        for _ in range(40):
            allowance = self.begin(meter)
            allowance.take_answers(1, [4000, 4000], is_stated=False)
            self.end(allowance, 20)
        assert 10 < meter.usual_tokens < 15

    @pytest.mark.parametrize(("status", "left"), [(400, "50"), (0, "50"), (429, "100"), (503, "100")])
    def test_the_reading_of_what_is_refused_counts_unless_the_server_had_no_room(
        self, status: int, left: str
    ) -> None:
        meter = meter_of(tokens_per_minute=100)
        self.end(self.begin(meter, 50), 0, status)
        assert self.left(meter)[0] == left


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
async def test_a_burst_takes_no_more_than_there_is(served: Served, engine: FakeEngine) -> None:
    engine.script.first_delay = 0.5
    answers = await asyncio.gather(*(ask(served, CHAT, messages=HELLO, max_tokens=400) for _ in range(20)))
    refused = [answer for answer in answers if answer.status != 200]
    assert len(refused) == 18
    assert all(check_refused(answer, "tokens") <= 60 for answer in refused)
    metrics = (await served.get("/metrics")).body.decode()
    assert 'onbeat_rate_limited_total{limit="tokens"} 18.0' in metrics


@pytest.mark.parametrize("served", [limited(tokens_per_minute=1000)], indirect=True)
async def test_a_body_of_unknown_length_counts_by_its_own(served: Served) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "' + b"a" * 4000
        yield b'", "max_tokens": 1}'

    headers = {"authorization": "Bearer corpus", "content-type": "application/json"}
    async with served.session.post(f"{served.url}/tokenize", data=body(), headers=headers) as answer:
        assert answer.status == 200
    check_refused(await ask(served, input="a" * 700), "tokens")


@pytest.mark.parametrize("served", [limited(tokens_per_minute=1000)], indirect=True)
async def test_a_prompt_that_is_too_long_takes_what_it_cost_to_read(served: Served) -> None:
    assert (await ask(served, CHAT, messages=[{"role": "user", "content": "a" * 3000}])).status == 400
    answer = await ask(served, input="a")
    assert 200 < int(answer.headers["x-ratelimit-remaining-tokens"]) < 300


@pytest.mark.parametrize("served", [limited(max_open_requests=3)], indirect=True)
async def test_each_choice_is_a_request_and_texts_to_embed_are_one(
    served: Served, engine: FakeEngine
) -> None:
    engine.script.first_delay = 0.5
    asking = asyncio.create_task(ask(served, "/v1/completions", prompt=["a", "b"], max_tokens=1))
    await until(lambda: len(engine.requests) == 2)
    check_refused(await ask(served, CHAT, messages=HELLO, n=2), "open_requests")
    assert (await ask(served, input=["a"] * 4)).status == 200
    assert (await asking).status == 200
    never = await ask(served, CHAT, messages=HELLO, n=4)
    assert (never.status, never.headers["x-should-retry"]) == (429, "false")


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
