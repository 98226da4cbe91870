"""The official `openai` client against the real program with the embedded model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.cpu.e2e.program import ServerProgram

SKY: Any = [{"role": "user", "content": "Why is the sky blue?"}]
FRANCE = "The capital of France is"


@pytest.fixture
def client(smollm2_server: ServerProgram) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_chat(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=SKY, max_completion_tokens=16, temperature=0
    )
    (choice,) = answer.choices
    assert len(choice.message.content.split()) > 5
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 16
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 16


def test_chat_streamed_is_chat(client: Any) -> None:
    fields: Any = dict(model="smollm2", messages=SKY, max_tokens=12, temperature=0)  # noqa: C408 -- as at the call
    whole = client.chat.completions.create(**fields)
    chunks = list(
        client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 12


def test_a_model_that_ends_by_itself(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": "Say hi."}],
        max_tokens=200,
        temperature=0,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    assert answer.usage.completion_tokens < 200


async def test_async_streams_side_by_side(smollm2_server: ServerProgram) -> None:
    client: Any
    async with openai.AsyncOpenAI(base_url=f"{smollm2_server.url}/v1", api_key="none") as client:
        whole = await client.completions.create(model="smollm2", prompt=FRANCE, max_tokens=12, temperature=0)
        streams = [
            await client.completions.create(
                model="smollm2", prompt=FRANCE, max_tokens=12, temperature=0, stream=True
            )
            for _ in range(4)
        ]
        for stream in streams:
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == whole.choices[0].text
    assert "Paris" in whole.choices[0].text


def test_seeds_reproduce(client: Any) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(model="smollm2", prompt=FRANCE, max_tokens=5, seed=seed, n=3)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    first = texts(7)
    assert texts(7) == first
    assert texts(8) != first
    assert len(set(first)) > 1


def test_stop_strings(client: Any) -> None:
    fields: Any = dict(model="smollm2", prompt=FRANCE, max_tokens=16, temperature=0)  # noqa: C408
    whole = client.completions.create(**fields).choices[0].text
    stop = whole[10:14]
    expected = whole[: whole.index(stop)]
    answer = client.completions.create(**fields, stop=[stop, "never there"])
    assert answer.choices[0].text == expected
    assert answer.choices[0].finish_reason == "stop"
    chunks = list(client.completions.create(**fields, stop=stop, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model="smollm2", messages=SKY, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
    )
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert len(token.top_logprobs) == 3
        best = max(token.top_logprobs, key=lambda top: top.logprob)
        assert best.token == token.token  # greedy takes the most likely
        assert best.logprob == pytest.approx(token.logprob)
        assert token.logprob <= 0


def test_a_repeated_prompt_is_served_from_the_prefix_cache(client: Any) -> None:
    prompt = "onbeat " * 70
    fields: Any = dict(model="smollm2", prompt=prompt, max_tokens=8, temperature=0)  # noqa: C408
    first = client.completions.create(**fields)
    second = client.completions.create(**fields)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens > 64
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached % 16 == 0
    assert first.usage.prompt_tokens - 16 <= cached < first.usage.prompt_tokens
    assert second.choices[0].text == first.choices[0].text


def test_tokens_round_trip(smollm2_server: ServerProgram) -> None:
    text = "Größe 猫 🙂 <tag>\n\tend"
    with httpx.Client(base_url=smollm2_server.url) as http:
        tokens = http.post("/tokenize", json={"model": "smollm2", "prompt": text}).json()
        back = http.post("/detokenize", json={"model": "smollm2", "tokens": tokens["tokens"]}).json()
        assert back["prompt"] == text
        assert tokens["count"] == len(tokens["tokens"])
        assert tokens["max_model_len"] == 1024
        fields = {"max_tokens": 4, "temperature": 0}
        by_text = http.post("/v1/completions", json={"prompt": text, **fields}).json()
        by_tokens = http.post("/v1/completions", json={"prompt": tokens["tokens"], **fields}).json()
        assert by_text["choices"][0]["text"] == by_tokens["choices"][0]["text"]
        assert by_text["usage"]["prompt_tokens"] == tokens["count"]


def test_errors_are_the_clients_own_kinds(client: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="1024"):
        client.completions.create(model="smollm2", prompt=[1] * 2000)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model="smollm2", prompt="x", temperature=3)


def test_the_example_of_the_ready_line_works(smollm2_server: ServerProgram) -> None:
    run = subprocess.run(
        ["sh", "-c", smollm2_server.example() + " --silent --show-error --fail-with-body"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    answer = json.loads(run.stdout)
    assert answer["model"] == "smollm2"
    assert answer["choices"][0]["message"]["content"]
