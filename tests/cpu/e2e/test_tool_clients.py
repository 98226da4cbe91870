"""Tools and schemas through client libraries, which send and expect more than OpenAI's own client."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.cpu.e2e.program import ServerProgram

# their imports and their HTTP clients warn of much that is not ours
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=0, le=9)


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name} is not installed: pip install -e '.[clients]'")


def chat(server: ServerProgram, **fields: Any) -> Any:
    kind = library("langchain_openai").ChatOpenAI
    return kind(
        model="smollm2", base_url=f"{server.url}/v1", api_key="none", max_tokens=100, temperature=0, **fields
    )


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_gets_structured_output(smollm2_server: ServerProgram, method: str) -> None:
    asked = chat(smollm2_server).with_structured_output(Animal, method=method)
    assert isinstance(asked.invoke("Name an animal and count its legs."), Animal)


def test_langchain_binds_tools_and_goes_on(smollm2_server: ServerProgram) -> None:
    messages: list[Any] = [("human", "Which animal is there?")]
    bound = chat(smollm2_server).bind_tools([Animal], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(messages)
    (call,) = answer.tool_calls
    assert Animal.model_validate(call["args"])
    chunks = list(bound.stream(messages))
    joined = chunks[0]
    for chunk in chunks[1:]:
        joined += chunk
    assert [each["args"] for each in joined.tool_calls] == [call["args"]]
    result = library("langchain_core.messages").ToolMessage("seen", tool_call_id=call["id"])
    assert chat(smollm2_server).invoke([*messages, answer, result]).content


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai"])
def test_litellm_calls_in_turns(
    smollm2_server: ServerProgram, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else importing it asks the network
    litellm = library("litellm")
    schema = Animal.model_json_schema()
    about: dict[str, Any] = {
        "model": f"{provider}/smollm2",
        "api_base": f"{smollm2_server.url}/v1",
        "api_key": "none",
        "max_tokens": 100,
        "tools": [{"type": "function", "function": {"name": "note", "parameters": schema}}],
    }
    messages: list[Any] = [{"role": "user", "content": "Note an animal."}]
    for _ in range(2):
        message = litellm.completion(messages=messages, tool_choice="required", **about).choices[0].message
        assert message.tool_calls
        messages.append(message)
        messages += [
            {"role": "tool", "tool_call_id": each.id, "content": "noted"} for each in message.tool_calls
        ]
    assert litellm.completion(messages=messages, tool_choice="none", **about).choices[0].message.content


def test_a_pydantic_ai_agent_with_a_tool_and_an_output(smollm2_server: ServerProgram) -> None:
    library("pydantic_ai")
    from pydantic_ai import Agent, UsageLimits
    from pydantic_ai.exceptions import UsageLimitExceeded
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{smollm2_server.url}/v1", api_key="none")
    model = OpenAIChatModel("smollm2", provider=provider)
    calls: list[str] = []
    agent = Agent(model, output_type=Animal, model_settings={"max_tokens": 200, "seed": 1})

    @agent.tool_plain
    def count_legs(kind: Literal["cat", "dog"]) -> int:
        """Count an animal's legs."""
        calls.append(kind)
        return 4

    # each answer must be a call: of the tool, or of the output, which ends the run
    try:
        result = agent.run_sync("How many legs has a cat?", usage_limits=UsageLimits(request_limit=6))
    except UsageLimitExceeded:
        assert calls
    else:
        assert isinstance(result.output, Animal)
