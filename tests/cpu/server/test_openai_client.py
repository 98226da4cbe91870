"""The official client, over a real socket."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.cpu.server.running import HELLO, Served
from tests.fakes_engine import FakeEngine


async def test_chat_streams_text_and_finish_reason(served: Served) -> None:
    stream = await served.client.chat.completions.create(model="fake/model", messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]


async def test_chat_answers_whole(served: Served) -> None:
    completion = await served.client.chat.completions.create(model="fake/model", messages=HELLO)
    assert completion.choices[0].message.content == "Hello, world!"
    assert completion.usage is not None
    assert completion.usage.completion_tokens == len("Hello, world!") + 1  # the end token counts
    assert completion.usage.prompt_tokens == len("[user]hi\n[assistant]")


async def test_completion_streams_and_answers_whole(served: Served) -> None:
    whole = await served.client.completions.create(model="fake/model", prompt="Say", max_tokens=5)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello", "length")
    stream = await served.client.completions.create(
        model="fake/model", prompt="Say", max_tokens=5, stream=True
    )
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Hello"


async def test_sync_client_streams(served: Served) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            stream = client.chat.completions.create(model="fake/model", messages=HELLO, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == "Hello, world!"


async def test_stream_options_give_usage_at_the_end(served: Served, engine: FakeEngine) -> None:
    engine.script.num_cached_tokens = 3
    stream = await served.client.chat.completions.create(
        model="fake/model", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (14, 3)


async def test_models_are_listed_and_found_by_name(served: Served) -> None:
    models = [model async for model in served.client.models.list()]
    assert [model.id for model in models] == ["fake/model"]
    assert (await served.client.models.retrieve("fake/model")).id == "fake/model"
    with pytest.raises(openai.NotFoundError):
        await served.client.models.retrieve("other")


async def test_client_raises_its_own_errors(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await served.client.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as wrong:
        await served.client.chat.completions.create(model="fake/model", messages=HELLO, temperature=7)
    assert wrong.value.param == "temperature"
