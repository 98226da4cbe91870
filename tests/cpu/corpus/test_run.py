"""A corpus against an endpoint that has no room, refuses texts, or breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from onbeat.core.errors import ConfigError, OnbeatError
from onbeat.corpus.run import CorpusJob, CorpusOutcome, CorpusRun
from onbeat.corpus.sender import Endpoint

Answer = tuple[int, dict[str, Any], dict[str, str]]


def refusal(status: int, message: str = "no", **headers: str) -> Answer:
    return status, {"error": {"message": message}}, headers


@dataclass
class FakeEndpoint:
    """Embeds a text as its length, unless `answer` has another answer to its texts."""

    answer: Callable[[list[str]], Answer | None] = lambda _texts: None
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        if (other := self.answer(body["input"])) is not None:
            status, content, headers = other
            return web.json_response(content, status=status, headers=headers)
        data = [{"index": index, "embedding": [len(text)]} for index, text in enumerate(body["input"])]
        return web.json_response({"data": data[::-1], "usage": {"prompt_tokens": len(data)}})


@asynccontextmanager
async def serving(fake: FakeEndpoint) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/embeddings", fake.handle)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")


class Shown:
    """Takes no notice."""

    problems: list[str]

    def __init__(self) -> None:
        self.problems = []

    def begin(self, num_texts: int, num_done: int) -> None:
        self.begun = num_texts, num_done

    def advance(self, num_texts: int, num_tokens: int, problem: str) -> None:
        self.problems.append(problem)


async def embed(
    fake: FakeEndpoint, tmp_path: Path, texts: list[str], shown: Shown | None = None, **fields: Any
) -> CorpusOutcome:
    patience = fields.pop("patience", 60.0)
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b"\n".join(map(orjson.dumps, texts)))
    job = CorpusJob(path=corpus, out=tmp_path / "out.jsonl", **({"batch_size": 4} | fields))
    async with serving(fake) as url:
        return await CorpusRun(job, Endpoint(root=url, patience=patience), shown or Shown()).run()


def lines_done(tmp_path: Path) -> dict[int, list[float]]:
    lines = [orjson.loads(line) for line in (tmp_path / "out.jsonl").read_bytes().splitlines()]
    found = {each["line"]: each["embedding"] for each in lines}
    assert len(found) == len(lines), "a line is written once"
    return found


async def test_each_text_gets_its_own_embedding(tmp_path: Path) -> None:
    fake = FakeEndpoint()
    texts = ["x" * size for size in range(1, 24)]
    outcome = await embed(fake, tmp_path, texts)
    assert (outcome.num_texts, outcome.num_done, outcome.refused) == (23, 23, [])
    assert lines_done(tmp_path) == {size: [size] for size in range(1, 24)}
    assert fake.bodies[0] == {
        "input": texts[:4],
        "encoding_format": "float",
        "slo": {"class": "offline"},
    }
    outcome = await embed(fake, tmp_path, texts)
    assert (outcome.num_done, len(fake.bodies)) == (23, 6), "nothing is sent again"


async def test_an_endpoint_without_room_is_asked_again(tmp_path: Path) -> None:
    answers: list[Answer | None] = [
        refusal(429, **{"Retry-After": "1", "retry-after-ms": "10"}),
        refusal(503, **{"Retry-After": "0.01"}),
        None,
        refusal(429, **{"retry-after-ms": "10"}),
    ]
    fake, shown = FakeEndpoint(lambda _texts: answers.pop(0) if answers else None), Shown()
    outcome = await embed(fake, tmp_path, ["a", "bb"], shown, batch_size=1, concurrency=1)
    assert outcome.num_done == 2
    assert shown.problems == ["HTTP 429: no", "HTTP 503: no", "", "HTTP 429: no", ""]
    assert len(fake.bodies) == 5
    assert lines_done(tmp_path) == {1: [1], 2: [2]}


async def test_a_refused_text_is_found_and_the_others_go_on(tmp_path: Path) -> None:
    fake = FakeEndpoint(lambda texts: refusal(400, "too long") if "bad" in texts else None)
    texts = ["a", "b", "bad", "c", "d", "e", "bad"]
    outcome = await embed(fake, tmp_path, texts)
    assert outcome.refused == [(3, "too long"), (7, "too long")]
    assert lines_done(tmp_path).keys() == {1, 2, 4, 5, 6}


async def test_what_no_text_can_help_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"answers HTTP 401: no; set the key in OPENAI_API_KEY"):
        await embed(FakeEndpoint(lambda _texts: refusal(401)), tmp_path, ["a"] * 9)
    with pytest.raises(ConfigError, match="takes none of the first 100 texts: no such dimensions"):
        await embed(FakeEndpoint(lambda _texts: refusal(400, "no such dimensions")), tmp_path, ["a"] * 200)
    odd = FakeEndpoint(lambda _texts: (200, {"data": []}, {}))
    with pytest.raises(OnbeatError, match="does not answer like an endpoint of embeddings"):
        await embed(odd, tmp_path, ["a"])


async def test_patience_ends(tmp_path: Path) -> None:
    fake = FakeEndpoint(lambda _texts: refusal(429, "later", **{"Retry-After": "60"}))
    with pytest.raises(OnbeatError, match=r"takes no texts within 5 s \(HTTP 429: later\); run the command"):
        await embed(fake, tmp_path, ["a"], patience=5.0)


async def test_a_corpus_that_has_changed(tmp_path: Path) -> None:
    await embed(FakeEndpoint(), tmp_path, ["a", "b"])
    with pytest.raises(ConfigError, match="line 2 of the corpus is not the text whose embedding"):
        await embed(FakeEndpoint(), tmp_path, ["a", "other"])
