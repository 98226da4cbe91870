"""Gemma 3 270M, a base model: completions work, chat is refused for want of a template."""

from __future__ import annotations

import httpx
import openai
import pytest

from onbeat.core.errors import ModelLoadError
from onbeat.hub.resolve import resolve_model
from tests.cpu.e2e.program import SMALL, serving


@pytest.mark.slow
def test_gemma() -> None:
    try:
        resolve_model("gemma3-270m", offline=True)
    except ModelLoadError as error:
        pytest.skip(str(error))
    with serving("gemma3-270m", *SMALL) as server:
        assert "/v1/completions" in server.example()  # the example is one that works
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["gemma3-270m"]
            answer = client.completions.create(
                model="gemma3-270m", prompt="The capital of France is", max_tokens=8, temperature=0
            )
            assert "France" in answer.choices[0].text
        body = {"messages": [{"role": "user", "content": "hi"}]}
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=body)
        assert reply.status_code == 400
        assert "chat template" in reply.json()["error"]["message"]
