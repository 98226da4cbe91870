"""Conversations through LiteLLM and LangChain, which send more than OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chat_templates import THINKING_HERMES
from tests.cpu.server.running import Served, serving
from tests.cpu.server.test_tools import PlainTokenizer, call
from tests.fakes_engine import FakeEngine

NAME = "fake/model"
EXAMPLE = Path(__file__).parents[3] / "examples" / "litellm_chat.py"
# their imports and their HTTP clients warn of much that is not ours
pytestmark = pytest.mark.filterwarnings("ignore")


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[clients]'")


@pytest.fixture
def litellm(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network
    return library("litellm")


@pytest.mark.slow
@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
async def test_litellm_talks_in_turns(served: Served, litellm: Any, provider: str) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    ask = {"model": f"{provider}/{NAME}", "api_base": f"{served.url}/v1", "api_key": "none"}
    for _ in range(3):
        answer = await litellm.acompletion(messages=messages, **ask)
        assert answer.choices[0].message.content == "Hello, world!"
        messages += [answer.choices[0].message, {"role": "user", "content": "and then?"}]


@pytest.mark.slow
async def test_the_example_talks_in_turns(served: Served, litellm: Any) -> None:
    own = {"OPENAI_BASE_URL": f"{served.url}/v1", "MODEL": NAME}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, EXAMPLE, "hi", "and then?"),
        env={**os.environ, **own},
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert (process.returncode, out) == (0, b"> hi\nHello, world!\n> and then?\nHello, world!\n")


@pytest.mark.slow
async def test_litellm_streams(served: Served, litellm: Any) -> None:
    stream = await litellm.acompletion(
        model=f"hosted_vllm/{NAME}",
        api_base=f"{served.url}/v1",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        reasoning_effort="none",
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello, world!"


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
async def test_litellm_calls_tools_in_turns_through_anthropics_api(
    engine: FakeEngine, litellm: Any, *, streams: bool
) -> None:
    about = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": about}}]
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with serving(engine, tokenizer=PlainTokenizer(), template=THINKING_HERMES) as served:

        async def ask(text: str) -> Any:
            engine.script.text = text
            answer = await litellm.acompletion(
                model=f"anthropic/{NAME}",
                api_base=served.url,
                api_key="none",
                messages=messages,
                tools=tools,
                stream=streams,
                max_tokens=200,  # else it asks for 128,000
            )
            if streams:
                answer = litellm.stream_chunk_builder([chunk async for chunk in answer])
            messages.append(answer.choices[0].message)
            return messages[-1]

        for city in ("Paris", "Rome"):
            (found,) = (await ask(call("get_weather", city=city))).tool_calls
            assert found.function.name == "get_weather"
            assert json.loads(found.function.arguments) == {"city": city}
            messages.append({"role": "tool", "tool_call_id": found.id, "content": f"sun in {city}"})
        assert (await ask("All is well.")).content == "All is well."
        assert (await served.get("/metrics")).body.decode().count('endpoint="/v1/messages"') == 1
    prompt = bytes(token for token in engine.requests[-1].prompt_token_ids if token < 256).decode()
    assert prompt.index("sun in Paris") < prompt.index('"Rome"') < prompt.index("sun in Rome")


@pytest.mark.slow
async def test_langchain_talks_in_turns(served: Served) -> None:
    chat = library("langchain_openai").ChatOpenAI(model=NAME, base_url=f"{served.url}/v1", api_key="none")
    messages: list[Any] = [("human", "hi")]
    for _ in range(3):
        answer = await chat.ainvoke(messages)
        assert answer.content == "Hello, world!"
        messages += [answer, ("human", [{"type": "text", "text": "and"}, {"type": "text", "text": "then?"}])]
    assert "".join([chunk.content async for chunk in chat.astream(messages)]) == "Hello, world!"
    batch = await asyncio.to_thread(chat.batch, [messages, messages])
    assert [one.content for one in batch] == ["Hello, world!"] * 2
