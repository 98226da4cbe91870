"""Embeddings, rankings and scores, over a real socket; the fake model counts tokens modulo its size."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from onbeat.core.errors import Overloaded
from onbeat.core.request import SamplingParams
from onbeat.server.embeddings import _base64
from onbeat.server.generation import MOST_EMBEDDED
from onbeat.server.server_config import MAX_INPUTS
from tests.cpu.server.asking import CHAT, TEXT, check
from tests.cpu.server.running import HELLO, Served
from tests.examples import examples
from tests.fakes_engine import BOS, EMBEDDING_SIZE, VOCAB_SIZE, FakeEngine, counted
from tests.many_cases import each_case

PATH = "/v1/embeddings"
TOLERANCE = 1e-6


def unit(token_ids: list[int], dimensions: int | None = None) -> np.ndarray:
    vector = counted(token_ids)[:dimensions]
    found: np.ndarray = vector / np.linalg.norm(vector)
    return found


def tokens(text: str) -> list[int]:
    return [BOS, *text.encode()]


async def ask(served: Served, path: str = PATH, **fields: Any) -> dict[str, Any]:
    answer = await served.post(path, fields)
    assert answer.status == 200, answer.body
    body: dict[str, Any] = answer.json
    return body


@pytest.mark.parametrize("given_format", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_the_official_client_gets_unit_vectors(served: Served, given_format: dict[str, Any]) -> None:
    found = await served.client.embeddings.create(model="fake/model", input=["one", "other"], **given_format)
    assert (found.object, found.model, [each.index for each in found.data]) == ("list", "fake/model", [0, 1])
    for each, text in zip(found.data, ["one", "other"], strict=True):
        vector: Any = each.embedding
        if (
            given_format.get("encoding_format") == "base64"
        ):  # the client decodes only what it asked for itself
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        np.testing.assert_allclose(vector, unit(tokens(text)), atol=TOLERANCE)
    assert (found.usage.prompt_tokens, found.usage.total_tokens) == (4 + 6, 4 + 6)


@pytest.mark.parametrize(
    ("given_input", "expected"),
    [
        ("text", [tokens("text")]),
        ([5, 6, 6], [[5, 6, 6]]),
        ([[5, 6, 6], [7]], [[5, 6, 6], [7]]),
        (["é", "b"], [tokens("é"), tokens("b")]),
    ],
)
async def test_texts_and_token_ids(served: Served, given_input: Any, expected: list[list[int]]) -> None:
    body = await ask(served, input=given_input)
    assert body.keys() == {"id", "object", "created", "data", "model", "usage"}
    for each, token_ids in zip(body["data"], expected, strict=True):
        np.testing.assert_allclose(each["embedding"], unit(token_ids), atol=TOLERANCE)


@pytest.mark.parametrize("dimensions", [1, 7, EMBEDDING_SIZE])
async def test_dimensions_are_the_first_numbers_normalised_again(served: Served, dimensions: int) -> None:
    text = "\x01\x02\x02 of all"
    (found,) = (await ask(served, input=text, dimensions=dimensions, add_special_tokens=False))["data"]
    assert len(found["embedding"]) == dimensions
    expected = counted(list(text.encode()))[:dimensions]
    length = np.linalg.norm(expected) or 1.0
    np.testing.assert_allclose(found["embedding"], expected / length, atol=TOLERANCE)


async def test_without_normalize_the_numbers_are_the_engines(served: Served) -> None:
    (found,) = (await ask(served, input="aab", normalize=False, dimensions=3))["data"]
    assert found["embedding"] == counted(tokens("aab"))[:3].tolist()


async def test_base64_is_of_the_numbers_bytes(served: Served) -> None:
    (found,) = (await ask(served, input="aab", encoding_format="base64"))["data"]
    vector = np.frombuffer(base64.b64decode(found["embedding"]), "<f4")
    np.testing.assert_allclose(vector, unit(tokens("aab")), atol=TOLERANCE)


async def test_truncation_keeps_the_last_tokens(served: Served, engine: FakeEngine) -> None:
    (found,) = (await ask(served, input="abcdef", truncate_prompt_tokens=2))["data"]
    np.testing.assert_allclose(found["embedding"], unit(list(b"ef")), atol=TOLERANCE)
    first = await ask(served, input="abcdef", truncate_prompt_tokens=2, truncation_side="right")
    np.testing.assert_allclose(first["data"][0]["embedding"], unit([BOS, ord("a")]), atol=TOLERANCE)
    (found,) = (await ask(served, input=[[9] * 5000], truncate_prompt_tokens=-1))["data"]
    assert len(engine.requests[-1].prompt_token_ids) == engine.max_model_len


@pytest.mark.parametrize(
    ("path", "fields", "kept"),
    [
        (PATH, {"truncate_prompt_tokens": -1}, b"b" * 2048),
        (PATH, {"truncate_prompt_tokens": 2, "truncation_side": "right"}, bytes([BOS % 256]) + b"a"),
        ("/v1/rerank", {"truncate_prompt_tokens": -1}, b"b" * 2048),
        ("/score", {"truncate_prompt_tokens": -1}, b"b" * 2048),
    ],
)
async def test_a_text_of_any_length_is_cut(
    served: Served, engine: FakeEngine, path: str, fields: dict[str, Any], kept: bytes
) -> None:
    text = "a" * 200_000 + "b" * 200_000
    given: dict[str, Any] = {
        "/v1/rerank": {"query": "a", "documents": [text]},
    }
    given["/score"] = {"text_1": "a", "text_2": text}
    await ask(served, path, **given.get(path, {"input": text}), **fields)
    assert bytes(each % 256 for each in engine.requests[-1].prompt_token_ids) == kept
    if path == PATH:
        check(await served.post(path, {"input": text}), 400, "context_length_exceeded", "input")
        too_much = {"prompt": text, "truncate_prompt_tokens": 10**6}
        check(await served.post(TEXT, too_much), 400, "context_length_exceeded", "prompt")


async def test_a_text_may_fill_the_context(served: Served, engine: FakeEngine) -> None:
    body = await ask(served, input=[9] * engine.max_model_len)
    assert body["usage"]["prompt_tokens"] == engine.max_model_len
    answer = await served.post(PATH, {"input": [[1], [9] * (engine.max_model_len + 1)]})
    assert "input[1] has 2049 tokens" in check(answer, 400, "context_length_exceeded", "input")


async def test_messages_are_rendered(served: Served) -> None:
    (found,) = (await ask(served, messages=HELLO, add_generation_prompt=False))["data"]
    np.testing.assert_allclose(found["embedding"], unit(list(b"[user]hi\n")), atol=TOLERANCE)


async def test_requests_of_the_engine(served: Served, engine: FakeEngine) -> None:
    body = await ask(served, input=["a", "b"], slo={"ttft_ms": 60_000, "class": "offline"}, user="me")
    one, other = engine.requests
    assert (one.pooling, one.sampling) == ("last", SamplingParams(max_tokens=1))
    assert (one.slo_class, one.weight) == ("offline", 0.5)
    assert one.whole == other.whole
    assert one.whole is not None
    assert one.whole[1:] == (2, 4)
    report = body["slo"]
    assert (report["met"], report["class"], report["relegated"]) == (True, "offline", False)
    assert report["ttft_ms"] >= 0
    assert report["token_attainment"] is None


async def test_the_offline_class_has_no_objectives(served: Served, engine: FakeEngine) -> None:
    assert "slo" not in await ask(served, input="a", slo={"class": "offline"})
    assert engine.requests[0].slo is None


async def test_a_late_embedding_has_missed(served: Served, engine: FakeEngine) -> None:
    engine.script.first_delay = 0.05
    body = await ask(served, input="a", slo={"ttft_ms": 1})
    assert body["slo"]["met"] is False


async def test_metrics_and_log_count_them(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "onbeat.server"):
        await ask(served, input=["a", "bc"], slo={"ttft_ms": 60_000, "class": "offline"})
    (line,) = [record.message for record in caplog.records if record.name == "onbeat.server"]
    assert "/v1/embeddings" in line
    assert "prompt_tokens=5 output_tokens=0 ttft_ms=" in line
    metrics = (await served.get("/metrics")).body.decode()
    assert 'onbeat_embeddings_total{class="offline"} 2' in metrics
    assert 'onbeat_embedding_tokens_total{class="offline"} 5' in metrics
    assert "onbeat_output_tokens_total 0" in metrics


async def test_at_most_so_many_run_at_once(served: Served, engine: FakeEngine) -> None:
    engine.script.first_delay = 0.3
    asking = asyncio.create_task(
        served.post(PATH, {"input": [[1]] * MAX_INPUTS, "encoding_format": "base64"})
    )
    most = 0
    while not asking.done():
        most = max(most, len(engine.running_ids))
        await asyncio.sleep(0.01)
    answer = await asking
    assert [each["index"] for each in answer.json["data"]] == list(range(MAX_INPUTS))
    assert most == MOST_EMBEDDED


async def test_a_client_that_leaves_aborts_all(served: Served, engine: FakeEngine) -> None:
    engine.script.first_delay = 60
    asking = asyncio.create_task(served.post(PATH, {"input": [[1]] * 300}))
    while len(engine.running_ids) < MOST_EMBEDDED:
        await asyncio.sleep(0.01)
    asking.cancel()
    while engine.running_ids:
        await asyncio.sleep(0.01)
    assert len(engine.requests) == MOST_EMBEDDED


async def test_what_the_engine_refuses_or_fails_on(served: Served, engine: FakeEngine) -> None:
    engine.script.error_after = 0
    check(await served.post(PATH, {"input": ["a", "b"]}), 500, "engine_error")
    engine.script.reject = Overloaded("too many wait", code="server_overloaded", retry_after=3.0)
    answer = await served.post(PATH, {"input": ["a", "b"]})
    assert (answer.status, answer.headers["retry-after"]) == (503, "3")


@each_case(
    ("body", "param", "says"),
    [
        ({}, "input", "input, messages"),
        ({"input": "a", "messages": HELLO}, "input", "input and messages are given"),
        ({"input": []}, "input", "input is empty"),
        ({"input": ""}, "input", "input[0] is empty"),
        ({"input": ["a", ""]}, "input", "input[1] is empty"),
        ({"input": [[1], []]}, "input", "must be"),
        ({"input": [[[1]]]}, "input", "must be"),
        ({"input": [1, "a"]}, "input", "must be"),
        ({"input": [True]}, "input", "must be"),
        ({"input": {"text": "a"}}, "input", "must be"),
        ({"input": [1.5]}, "input", "must be"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", " 2049 texts; at most 2048"),
        ({"input": [VOCAB_SIZE]}, "input", "model's 260 tokens"),
        ({"input": [[1], [-1]]}, "input", "model's 260 tokens"),
        ({"input": [10**18]}, "input", "model's 260 tokens"),
        ({"input": [10**30]}, "input", "must be"),
        ({"input": "a", "dimensions": 0}, "dimensions", "equal to 1"),
        ({"input": "a", "dimensions": EMBEDDING_SIZE + 1}, "dimensions", "have 32 numbers"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "base64"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "no prompt"),
        ({"input": "a", "truncate_prompt_tokens": 9999}, "truncate_prompt_tokens", "truncation size"),
        ({"input": "a", "embed_dtype": "fp8_e4m3"}, "embed_dtype", "not supported"),
        ({"input": "a", "use_activation": False}, "use_activation", "send normalize"),
        ({"input": "a", "padding": "max_length"}, "padding", "not supported"),
        ({"input": "a", "priority": 1}, "priority", "--scheduling-policy priority"),
    ],
)
async def test_wrong_requests(served: Served, body: dict[str, Any], param: str, says: str) -> None:
    answer = await served.post(PATH, body)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert says in answer.error["message"]


async def test_misspelt_fields_are_refused_and_unknown_ones_named(served: Served) -> None:
    check(await served.post(PATH, {"input": "a", "dimension": 3}), 400, "unknown_parameter", "dimension")
    answer = await served.post(PATH, {"input": "a", "embed_colour": "red"})
    assert answer.headers["x-onbeat-ignored-fields"] == "embed_colour"


async def test_a_model_without_a_head_generates_nothing(served: Served, engine: FakeEngine) -> None:
    engine.generates = False
    assert "/v1/embeddings" in check(await served.post(CHAT, {"messages": HELLO}), 400, "no_generation")
    check(await served.post(TEXT, {"prompt": "a"}), 400, "no_generation")
    await ask(served, input="a")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_documents_are_ordered_by_their_cosines(served: Served, path: str) -> None:
    documents = ["zzz", "aab", "abb", "aab"]
    body = await ask(served, path, query="aab", documents=documents, top_n=3)
    assert [each["index"] for each in body["results"]] == [1, 3, 2]
    scores = [each["relevance_score"] for each in body["results"]]
    expected = [1.0, 1.0, float(unit(tokens("aab")) @ unit(tokens("abb")))]
    np.testing.assert_allclose(scores, expected, atol=TOLERANCE)
    assert [each["document"]["text"] for each in body["results"]] == ["aab", "aab", "abb"]
    assert body["usage"] == {"prompt_tokens": 20, "total_tokens": 20}
    whole = await ask(served, path, query="aab", documents=documents, return_documents=False)
    assert [each.keys() for each in whole["results"]] == [{"index", "relevance_score"}] * 4


@pytest.mark.parametrize(
    ("one", "other"), [("a", "b"), ("a", ["a", "b"]), (["a", "b"], ["b", "b"]), (["a"], "b")]
)
async def test_scores_are_cosines(served: Served, one: Any, other: Any) -> None:
    body = await ask(served, "/v1/score", text_1=one, text_2=other)
    ones, others = ([each] if isinstance(each, str) else each for each in (one, other))
    pairs = zip(ones * len(others) if len(ones) == 1 else ones, others, strict=True)
    expected = [float(unit(tokens(left)) @ unit(tokens(right))) for left, right in pairs]
    assert [each["index"] for each in body["data"]] == list(range(len(others)))
    np.testing.assert_allclose([each["score"] for each in body["data"]], expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("first", "second"), [("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
async def test_the_sides_of_scores_have_other_names_too(served: Served, first: str, second: str) -> None:
    body = await ask(served, "/score", **{first: "a", second: ["a", "b"]})
    assert body["data"] == (await ask(served, "/score", text_1="a", text_2=["a", "b"]))["data"]
    missing = await served.post("/score", {first: "a"})
    assert "text_2" in check(missing, 400, "missing_required_parameter", "text_2")
    twice = await served.post("/score", {"text_1": "a", first: "b", second: "c"})
    assert f"text_1 and {first} " in check(twice, 400, "invalid_value", "text_1")
    both = await served.post("/score", {first: ["a", "b"], second: ["a"]})
    assert f"2 texts and {second} 1" in check(both, 400, "invalid_value", first)
    check(await served.post("/score", {first: "a", second: [""]}), 400, "invalid_value", second)


async def test_wrong_rankings_and_scores(served: Served) -> None:
    check(await served.post("/rerank", {"query": "a", "documents": []}), 400, "invalid_value", "documents")
    check(await served.post("/rerank", {"query": "a", "documents": [""]}), 400, "invalid_value", "documents")
    check(await served.post("/rerank", {"query": "", "documents": ["a"]}), 400, "invalid_value", "query")
    check(await served.post("/rerank", {"query": "a", "documents": [3]}), 400, "invalid_value", "documents")
    for query, document, param in (("a" * 3000, "a", "query"), ("a", "a" * 3000, "documents")):
        asked = {"query": query, "documents": [document]}
        message = check(await served.post("/rerank", asked), 400, "context_length_exceeded", param)
        assert message.startswith(f"{param}[0] has 3001 tokens")
    texts = ["a"] * (MAX_INPUTS + 1)
    check(await served.post("/score", {"text_1": "a", "text_2": texts}), 400, "invalid_value", "text_2")
    check(
        await served.post("/score", {"text_1": ["a", "b"], "text_2": ["c"]}), 400, "invalid_value", "text_1"
    )


@given(arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32)))
@examples(100)
def test_base64_gives_back_every_bit(vector: np.ndarray) -> None:
    text = orjson.loads(_base64(vector))
    found = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    assert found.tobytes() == vector.astype("<f4").tobytes()
