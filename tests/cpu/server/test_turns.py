"""Requests and answers at the limits: none takes the event loop for long, whatever the route."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import numpy as np
import pytest
import pytest_asyncio
from fastapi.openapi.utils import get_openapi
from hypothesis import given, settings
from hypothesis import strategies as st

from onbeat.cluster.gate import MOST_AT_ONCE, ClientStream, HandOut, prompt_hashes
from onbeat.core.hashing import hash_blocks, root_hash
from onbeat.core.protocols import Delivery
from onbeat.core.request import FinishReason, Request, RequestOutput
from onbeat.core.slo import SLO
from onbeat.server import openapi, services
from onbeat.server.server_config import MAX_ANSWER_PARTS, MAX_INPUTS, MAX_JSON_VALUES
from tests import fakes_engine
from tests.cpu.server.loop_turns import KEY, post_from_outside, quickly
from tests.cpu.server.running import HELLO, Answer, Served, parse_events, serving
from tests.fakes_engine import FakeEngine, Script
from tests.fleet.fleets import fleet_of
from tests.waiting import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
PROMPTS = [f"{index} a" for index in range(32)]
LONG_PROMPTS = [[5] * 8000] * 32
USAGE = {"include_usage": True, "continuous_usage_stats": True}
TIGHT = {"ttft_ms": 1, "tbt_ms": 1, "e2e_ms": 1}
STOPS = ["".join(chr((start + k) % 97) for k in range(970)) + "z" for start in range(0, 96, 6)]
"""Each begins where an answer is, for as long as may be, and never ends in one."""

MANY = {"prompt": PROMPTS, "n": 16, "max_tokens": 12}
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "512 choices": (TEXT, MANY),
    "512 streamed choices": (TEXT, {**MANY, "stream": True, "stream_options": USAGE}),
    "512 choices with objectives": (TEXT, {**MANY, "slo": TIGHT, "stream": True}),
    "512 choices with alternatives": (TEXT, {**MANY, "logprobs": 20}),
    "512 streamed choices with alternatives": (TEXT, {**MANY, "logprobs": 20, "stream": True}),
    "512 choices with long stops": (TEXT, {**MANY, "max_tokens": 75, "stop": STOPS}),
    "512 choices of long ids": (
        TEXT,
        {**MANY, "prompt": LONG_PROMPTS, "max_tokens": 2, "return_token_ids": True},
    ),
    "512 streamed choices of long ids": (
        TEXT,
        {**MANY, "prompt": LONG_PROMPTS, "max_tokens": 2, "return_token_ids": True, "stream": True},
    ),
    "512 echoes": (TEXT, {**MANY, "prompt": ["a" * 8000] * 32, "max_tokens": 2, "echo": True}),
    "512 streamed echoes": (
        TEXT,
        {**MANY, "prompt": ["a" * 8000] * 32, "max_tokens": 2, "echo": True, "stream": True},
    ),
    "the longest prompt": (TEXT, {"prompt": [5] * (MAX_JSON_VALUES - 100), "return_token_ids": True}),
    "16 choices of a long prompt": (TEXT, {"prompt": [5] * 100_000, "n": 16, "max_tokens": 2}),
    "a chat with alternatives": (
        CHAT,
        {"messages": HELLO, "n": 16, "max_tokens": 200, "logprobs": True, "top_logprobs": 20},
    ),
    "a streamed chat with alternatives": (
        CHAT,
        {
            "messages": HELLO,
            "n": 16,
            "max_tokens": 200,
            "logprobs": True,
            "top_logprobs": 20,
            "return_token_ids": True,
            "stream": True,
            "stream_options": USAGE,
        },
    ),
    "a long chat": (
        CHAT,
        {"messages": HELLO, "max_tokens": 1000, "logprobs": True, "top_logprobs": 20, "slo": TIGHT},
    ),
}
LONG_PROMPT = [5] * 8000
SCORED = {
    "scored prompts": {"prompt": [LONG_PROMPT] * 6, "prompt_logprobs": 20},
    "a scored echo": {"prompt": [LONG_PROMPT], "echo": True, "logprobs": 20},
    "a streamed, scored echo": {"prompt": [LONG_PROMPT], "echo": True, "logprobs": 20, "stream": True},
}
"""Of whose prompts much is said at once, with their first token."""
MANY_ITEMS = [{"role": "user", "content": [{"type": "text", "text": "a"}]}] * 1000
"""Of a response's input, or blocks of messages."""


@asynccontextmanager
async def served_fleet(num_replicas: int = 1, **fields: Any) -> AsyncIterator[Served]:
    """Serve engines that have processes of their own, as real ones have."""
    limits: dict[str, Any] = {"max_num_seqs": 256, "max_num_batched_tokens": 2**14, "num_blocks": 300_000}
    async with (
        fleet_of(
            num_replicas, hashes_prompts=True, step_seconds=0.002, max_model_len=300_000, **limits
        ) as client,
        serving(cast(FakeEngine, client), has_fleet=True, api_keys=(KEY,), **fields) as served,
    ):
        for path in ("/metrics", "/fleet", "/v1/models"):  # what is made once, at the start
            assert (await post_from_outside(served, path, None)).status == 200
        assert (await post_from_outside(served, TEXT, b'{"prompt":"a"}')).status == 200
        yield served


# What tests of one server share: they leave nothing open, and what it remembers of earlier requests makes no
# turn shorter.
shared = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet_server() -> AsyncIterator[Served]:
    async with served_fleet() as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def old_server() -> AsyncIterator[Served]:
    """A server that has done much; what is asked of it changes nothing."""
    async with served_fleet(metrics_aliases="vllm") as served:
        for number in range(20_000):
            _end_one(served, number)
        yield served


async def test_no_prompt_that_is_routed_by_its_prefix_holds_up_the_event_loop() -> None:
    body = json.dumps({"prompt": [5] * (MAX_JSON_VALUES - 100), "n": 16, "max_tokens": 1}).encode()
    async with served_fleet(2) as served:
        answer = await quickly(lambda: post_from_outside(served, TEXT, body))
    assert answer.json["usage"]["completion_tokens"] == 16


async def test_a_client_that_leaves_512_choices_does_not_hold_up_the_event_loop() -> None:
    body = json.dumps({**MANY, "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()

    def leave() -> None:
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
        connection.request(
            "POST", TEXT, body, {"content-type": "application/json", "authorization": f"Bearer {KEY}"}
        )
        connection.getresponse().read(2**16)
        connection.close()

    async def leave_and_wait() -> Answer:
        await asyncio.to_thread(leave)
        await until(lambda: not served.app.state.fleet.replicas()[0].num_outstanding, timeout=30)
        return await post_from_outside(served, "/load", None)

    async with served_fleet() as served:
        assert (await quickly(leave_and_wait)).json == {"server_load": 0}


@shared
@pytest.mark.parametrize("name", ANSWERS)
async def test_no_answer_holds_up_the_event_loop(fleet_server: Served, name: str) -> None:
    path, fields = ANSWERS[name]
    body = json.dumps({"ignore_eos": True, **fields}).encode()
    answer = await quickly(lambda: post_from_outside(fleet_server, path, body))
    assert answer.status == 200, answer.body[:500]
    if fields.get("stream"):
        parts = [part for part in parse_events(answer.body)[:-1] if part["choices"]]
        assert len({part["choices"][0]["index"] for part in parts}) == fields.get("n", 1) * len(
            fields.get("prompt", [0])
        )
    else:
        choices = answer.json["choices"]
        num_tokens = fields.get("max_tokens", 16) * len(choices)
        assert answer.json["usage"]["completion_tokens"] == num_tokens
        assert {choice["finish_reason"] for choice in choices} == {"length"}


@shared
@pytest.mark.parametrize("name", SCORED)
async def test_no_scores_of_prompts_hold_up_the_event_loop(fleet_server: Served, name: str) -> None:
    fields = SCORED[name]
    body = json.dumps({"max_tokens": 1, **fields}).encode()
    answer = await quickly(lambda: post_from_outside(fleet_server, TEXT, body))
    assert answer.status == 200, answer.body[:500]
    choices = answer.json["choices"] if "stream" not in fields else parse_events(answer.body)[0]["choices"]
    for choice in choices:
        if "echo" in fields:
            assert len(choice["logprobs"]["top_logprobs"]) == 8001
        else:
            scores = choice["prompt_logprobs"]
            assert [next(iter(each.values()))["rank"] for each in scores[1:]] == list(range(1, 8000))


@shared
async def test_no_response_holds_up_the_event_loop(fleet_server: Served) -> None:
    fields = {"input": MANY_ITEMS, "max_output_tokens": 1000, "top_logprobs": 20, "ignore_eos": True}
    body = json.dumps({**fields, "include": ["message.output_text.logprobs"], "stream": True}).encode()
    answer = await quickly(lambda: post_from_outside(fleet_server, "/v1/responses", body))
    assert answer.status == 200, answer.body[:500]
    last = json.loads(answer.body.rpartition(b"\ndata: ")[2])
    assert (last["type"], last["response"]["usage"]["output_tokens"]) == ("response.incomplete", 1000)


@shared
async def test_no_message_of_anthropics_api_holds_up_the_event_loop(fleet_server: Served) -> None:
    fields = {"model": "fake", "messages": MANY_ITEMS, "max_tokens": 1000, "ignore_eos": True}
    body = json.dumps(fields).encode()
    answer = await quickly(lambda: post_from_outside(fleet_server, "/v1/messages", body))
    assert answer.status == 200, answer.body[:500]
    assert (answer.json["stop_reason"], answer.json["usage"]["output_tokens"]) == ("max_tokens", 1000)


@shared
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 2_000_000, "return_token_strs": True}),
        ("/detokenize", {"tokens": [97] * (MAX_JSON_VALUES - 10)}),
        ("/metrics", None),
        ("/state", None),
        ("/fleet", None),
        ("/v1/models", None),
        ("/openapi.json", None),
        ("/docs", None),
    ],
)
async def test_no_other_route_holds_up_the_event_loop(
    old_server: Served, path: str, body: dict[str, Any] | None
) -> None:
    data = None if body is None else json.dumps(body).encode()
    answer = await quickly(lambda: post_from_outside(old_server, path, data))
    assert answer.status == 200
    if path == "/metrics":
        assert b'onbeat_slo_requests_total{outcome="bad",slo_class="batch"} 20000.0' in answer.body


async def test_the_description_is_made_once_and_beside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers = []

    def make(**how: Any) -> dict[str, Any]:
        makers.append(threading.get_ident())
        return get_openapi(**how)

    monkeypatch.setattr(openapi, "get_openapi", make)
    one, other = await asyncio.gather(served.get("/openapi.json"), served.get("/openapi.json"))
    assert one.json == other.json
    assert "/v1/chat/completions" in one.json["paths"]
    assert len(makers) == 1
    assert makers[0] != threading.get_ident()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": ["a"] * MAX_INPUTS, "text_2": ["b"] * MAX_INPUTS}),
        ("/rerank", {"query": "a", "documents": ["b"] * MAX_INPUTS}),
        ("/v1/embeddings", {"input": ["a"] * MAX_INPUTS}),
    ],
)
async def test_no_embeddings_hold_up_the_event_loop(
    served: Served, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of today: 4,096 numbers for a text."""
    vector = np.linspace(-1, 1, 4096, dtype="<f4")
    monkeypatch.setattr(fakes_engine, "counted", lambda _: vector)
    data = json.dumps({**body, "slo": TIGHT}).encode()
    answer = await quickly(lambda: post_from_outside(served, path, data))
    assert answer.status == 200
    if path == "/score":
        scores = [each["score"] for each in answer.json["data"]]
        assert scores == pytest.approx([1.0] * MAX_INPUTS)


def _end_one(served: Served, number: int) -> None:
    """Let the server remember one more request, which was late."""
    request = Request(
        request_id=f"old-{number}", prompt_token_ids=range(5), slo=SLO(ttft=0.1), slo_class="batch"
    )
    tracker, now = served.app.state.telemetry.tracker, time.monotonic()
    tracker.open(request)
    tracker.deliver(RequestOutput(request.request_id, [1]), now, 1, made=now)
    tracker.close(request.request_id, FinishReason.STOP, now)


async def test_an_answer_of_several_choices_has_a_bound(served: Served, engine: FakeEngine) -> None:
    engine.max_model_len = 8000  # 32 of them are fewer
    most = MAX_ANSWER_PARTS // 512 // 21
    fields = {"prompt": ["a"] * 32, "n": 16, "logprobs": 20, "stop_token_ids": [ord("H")]}
    error = (await served.post(TEXT, {**fields, "max_tokens": most + 1})).error
    assert (error["code"], error["param"]) == ("answer_too_large", "n")
    for word in ("512 choices", f"{most + 1} tokens", "20 alternatives", f"most {MAX_ANSWER_PARTS}"):
        assert word in error["message"]
    assert error["message"].endswith(f"max_tokens to {most}")
    assert not engine.requests
    assert (await served.post(TEXT, {**fields, "max_tokens": most})).status == 200
    # one choice may always fill the context, and 16 may without alternatives
    engine.max_model_len = 2 * MAX_ANSWER_PARTS
    stop = {"messages": HELLO, "stop_token_ids": [ord("H")]}
    assert (await served.post(CHAT, {**stop, "logprobs": True, "top_logprobs": 20})).status == 200
    assert (await served.post(CHAT, {**stop, "n": 16})).status == 200
    assert (await served.post(CHAT, {**stop, "n": 2, "logprobs": True, "top_logprobs": 20})).status == 400


@given(st.integers(0, 70_000), st.sampled_from([1, 7, 16]))
@settings(max_examples=10, deadline=None)
def test_hashes_made_in_parts_are_those_of_the_whole_prompt(num_tokens: int, block_size: int) -> None:
    request = Request(request_id="a", prompt_token_ids=range(num_tokens), cache_salt="salt")
    expected = hash_blocks(root_hash("salt"), request.prompt_token_ids, block_size)
    assert asyncio.run(prompt_hashes(request, block_size)) == expected


async def test_a_step_for_many_wakes_some_streams_at_a_time_and_keeps_the_order() -> None:
    hand_out, order = HandOut(), list[tuple[int, float]]()
    opened = [ClientStream(str(i), "") for i in range(200)]

    async def read(index: int) -> None:
        for _ in range(3):
            item = await opened[index].queue.get()
            assert isinstance(item, Delivery)
            order.append((index, item.time))

    readers = [asyncio.create_task(read(index)) for index in range(200)]
    await asyncio.sleep(0)
    for time_ in range(3):
        for each in opened:
            hand_out.put(each, Delivery(float(time_), RequestOutput("", [])))
    rounds = []
    while not all(reader.done() for reader in readers):
        before = len(order)
        await asyncio.sleep(0)
        rounds.append(len(order) - before)
    assert max(rounds) <= MOST_AT_ONCE
    for index in range(200):
        assert [time_ for other, time_ in order if other == index] == [0.0, 1.0, 2.0]


async def test_full_rounds_of_garbage_collection_wait_until_nothing_is_open(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "TIDY_SECONDS", 0.01)
    collected: list[int] = []
    monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    monkeypatch.setattr(gc, "get_count", lambda: (0, 0, 1))
    before = gc.get_threshold()
    engine.script = Script("a", end=False, seconds_per_step=0.01)
    async with serving(engine) as served:
        assert gc.get_threshold()[2] > 10**6
        await until(lambda: collected)
        answer = asyncio.create_task(served.post(TEXT, {"prompt": "a", "max_tokens": 30}))
        await until(lambda: served.app.state.lifecycle.num_open)
        collected.clear()
        await asyncio.sleep(0.1)
        assert not collected
        assert (await answer).status == 200
        await until(lambda: collected)
    assert gc.get_threshold() == before
