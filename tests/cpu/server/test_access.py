"""API keys and CORS."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.server.config import ServerConfig
from tests.cpu.server.running import HELLO, Served

CHAT = "/v1/chat/completions"
KEYS = {"api_keys": ("first", "second")}


@pytest.mark.parametrize("served", [KEYS], indirect=True)
async def test_keys_guard_the_api(served: Served) -> None:
    for path in (CHAT, "/v1/completions", "/v1/models", "/v1/models/x", "/tokenize", "/detokenize"):
        for header in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
            answer = await served.post(path, {}, headers=header)
            assert answer.status == 401
            assert answer.error["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    for key in KEYS["api_keys"]:
        answer = await served.post(CHAT, {"messages": HELLO}, headers={"authorization": f"bearer {key}"})
        assert answer.status == 200


@pytest.mark.parametrize("served", [KEYS], indirect=True)
@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/ready", "/metrics", "/version", "/load", "/openapi.json"]
)
async def test_health_and_metrics_stay_open(served: Served, path: str) -> None:
    assert (await served.get(path)).status == 200


@pytest.mark.parametrize("path", ["/redoc", "/docs/oauth2-redirect"])
async def test_there_are_no_pages_that_nobody_documents(served: Served, path: str) -> None:
    assert (await served.get(path)).status == 404


@pytest.mark.parametrize("served", [KEYS], indirect=True)
async def test_a_key_of_odd_characters_is_refused(served: Served) -> None:
    answer = await served.post(CHAT, {}, headers={"authorization": "Bearer é\u00ff"})
    assert answer.status == 401


@pytest.mark.parametrize("served", [{"allowed_origins": ("https://a.example",), **KEYS}], indirect=True)
async def test_cors_lets_the_named_origins_in(served: Served) -> None:
    preflight = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    async with served.session.options(served.url + CHAT, headers=preflight) as response:
        assert response.status == 200
        assert response.headers["access-control-allow-origin"] == "https://a.example"
    answer = await served.post(CHAT, {}, headers={"origin": "https://a.example"})
    assert answer.status == 401
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = await served.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_without_origins_there_is_no_cors(served: Served) -> None:
    answer = await served.get("/health", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 70000},
        {"api_keys": ("",)},
        {"api_keys": ("é",)},
        {"max_n": 0},
        {"max_body_bytes": 0},
        {"shutdown_timeout": -1.0},
        {"ssl_keyfile": "key.pem"},
        {"metrics_aliases": "sglang"},
    ],
    ids=str,
)
def test_wrong_configurations_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**fields)  # type: ignore[arg-type]
