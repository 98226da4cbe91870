"""Flags of the server that change what answers say, and where they are found."""

from __future__ import annotations

import re

import pytest

from onbeat.core.errors import ConfigError
from onbeat.server.server_config import ServerConfig
from tests.cpu.server.asking import CHAT, TEXT, check
from tests.cpu.server.running import HELLO, Served
from tests.fakes_engine import FakeEngine


async def test_every_answer_has_a_name(served: Served) -> None:
    for path in ("/health", "/v1/models"):
        assert len((await served.get(path)).headers["x-request-id"]) == 32


@pytest.mark.parametrize("served", [{"force_include_usage": True}], indirect=True)
@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "a"})])
async def test_streams_tell_usage_unasked(served: Served, path: str, asked: dict[str, object]) -> None:
    *events, end, _ = await served.events(path, {**asked, "stream_options": {"include_usage": False}})
    counts = [event["usage"]["completion_tokens"] for event in (*events, end)]
    assert counts == sorted(counts)
    assert counts[-1] == 14
    assert end["choices"] == []
    assert "usage" in (await served.post(path, asked)).json


@pytest.mark.parametrize(
    "served", [{"root_path": "/llm", "api_keys": ("key",)}], indirect=True, ids=["root_path"]
)
@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_paths_are_taken_with_the_prefix_of_a_proxy_and_without(served: Served, prefix: str) -> None:
    own = {"Authorization": "Bearer key"}
    assert (await served.post(prefix + CHAT, {"messages": HELLO}, headers=own)).status == 200
    check(await served.post(prefix + CHAT, {"messages": HELLO}), 401, "invalid_api_key")
    assert (await served.get(f"{prefix}/health")).status == 200
    assert (await served.post(f"{prefix}/v1/messages", {})).json["type"] == "error"  # as Anthropic has it
    assert (await served.post(f"{prefix}{TEXT}", {"prompt": "a"}, headers=own)).status == 200
    page = (await served.get(f"{prefix}/docs")).body.decode()
    assert "/llm/openapi.json" in page
    assert (await served.get(f"{prefix}/docs/static/swagger-ui.css")).status == 200
    assert (await served.get(f"{prefix}/openapi.json")).json["servers"] == [{"url": "/llm"}]
    assert (await served.get("/llmx/health")).status == 401


@pytest.mark.parametrize("wrong", ["llm", "/llm/", "/a b", "http://a/llm"])
def test_a_prefix_is_a_path(wrong: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(wrong)):
        ServerConfig(root_path=wrong)


def test_a_model_has_no_empty_name() -> None:
    with pytest.raises(ConfigError, match="served_model_name is empty"):
        ServerConfig(served_model_names=("a", ""))


@pytest.mark.parametrize("taken", ["/v1", "/docs", "/fleet"])
def test_a_prefix_is_none_of_the_apis_own_paths(taken: str) -> None:
    with pytest.raises(ConfigError, match=f"root_path is '{taken}', where {taken}"):
        ServerConfig(root_path=taken)


async def test_usage_has_all_details(served: Served, engine: FakeEngine) -> None:
    engine.script.num_cached_tokens = 1
    for path, asked in ((TEXT, {"prompt": "a"}), (CHAT, {"messages": HELLO})):
        usage = (await served.post(path, asked)).json["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 0
