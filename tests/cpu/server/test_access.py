"""API keys, paths and CORS."""

from __future__ import annotations

import asyncio
import re
from urllib.parse import urlsplit

import orjson
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from onbeat.core.errors import ConfigError
from onbeat.server.server_config import ServerConfig
from tests.cpu.server.running import HELLO, Served
from tests.many_cases import each_case

CHAT = "/v1/chat/completions"
KEYS = {"api_keys": ("first", "second")}
OPEN = {
    "/",
    "/health",
    "/ping",
    "/ready",
    "/load",
    "/version",
    "/metrics",
    "/state",
    "/docs",
    "/openapi.json",
}
"""What docs/api.md leaves open."""
CONTROLS = ("%0A", "%0a", "%0D", "%0D%0A", "%00", "%09", "%1F", "%7F", "%C2%85", "%C2%9F")
TRICKS = (
    *(f"{{path}}{control}" for control in CONTROLS),
    *(
        "%0A{path}",
        "/%0A{path}",
        "/{path}",
        "//{path}",
        "{path}/",
        "{path}//",
        "{path};",
        "{path};x=1",
        "/.{path}",
    ),
    *(
        "{path}%2F",
        "%2F{path}",
        "{path}%20",
        "{path}%3F",
        "{path}?",
        "{path}?x=%0A",
        "{path}%250A",
        "{path}%23",
    ),
    *("/health/..{path}", "/health%2F..{path}", "/health;{path}", "/health%0A{path}", "{path}%0A/health"),
    *("http://elsewhere{path}", "http://elsewhere{path}%0A", "{upper}", "{encoded}", "{path}%C0%8A"),
)
"""Other ways to write a guarded path."""


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
@each_case("path", ["/health", "/ping", "/ready", "/metrics", "/state", "/version", "/load", "/openapi.json"])
async def test_health_and_metrics_stay_open(served: Served, path: str) -> None:
    assert (await served.get(path)).status == 200


@pytest.mark.parametrize("served", [{}, KEYS], indirect=True)
async def test_the_page_of_the_description_needs_no_other_host_and_no_key(served: Served) -> None:
    page = (await served.get("/docs")).body.decode()
    links = re.findall(r"(?:src|href)=[\"']([^\"']+)", page)
    assert any(link.endswith(".js") for link in links)
    for link in links:
        assert link.startswith("/"), link
        assert len((await served.get(link)).body) > 1000


async def test_there_is_one_page_of_the_description(served: Served) -> None:
    assert (await served.get("/redoc")).status == 404


@pytest.mark.parametrize("served", [KEYS], indirect=True)
async def test_a_key_of_odd_characters_is_refused(served: Served) -> None:
    answer = await served.post(CHAT, {}, headers={"authorization": "Bearer é\u00ff"})
    assert answer.status == 401


def routes(app: FastAPI) -> list[tuple[str, str]]:
    """Return the method and path of all that the application answers."""
    undescribed = [("GET", route.path) for route in app.routes if isinstance(route, Route)]
    described = [
        (method.upper(), path.replace("{model}", "fake/model"))
        for path, operations in app.openapi()["paths"].items()
        for method in operations
    ]
    return undescribed + described


async def send(
    served: Served, method: str, target: str, body: bytes = b"", key: str = ""
) -> tuple[int, bytes]:
    """Send a request whose target no client library has touched."""
    url = urlsplit(served.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"{method} {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{authorization}"
    writer.write(
        f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    )
    answer = await reader.read()
    writer.close()
    status, _, rest = answer.partition(b" ")[2].partition(b" ")
    return int(status), rest.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize("served", [KEYS], indirect=True)
async def test_what_is_not_listed_as_open_needs_a_key(served: Served) -> None:
    found = routes(served.app)
    assert {path for _, path in found} > OPEN - {"/"}
    for method, path in (*found, ("GET", "/"), ("GET", "/nowhere"), ("OPTIONS", CHAT), ("PUT", "/health/x")):
        status, _ = await send(served, method, path)
        assert status == (200 if path in OPEN else 401), (method, path)


@pytest.mark.parametrize("served", [KEYS], indirect=True)
@each_case("trick", TRICKS)
async def test_no_other_way_to_write_a_path_opens_it(served: Served, trick: str) -> None:
    body = orjson.dumps({"messages": HELLO})
    for method, path in routes(served.app):
        if path in OPEN:
            continue
        encoded = "".join(f"%{ord(letter):02X}" if letter != "/" else letter for letter in path)
        status, _ = await send(
            served, method, trick.format(path=path, upper=path.upper(), encoded=encoded), body
        )
        assert status in (400, 401), (method, path)
    assert served.engine.requests == []


@pytest.mark.parametrize("served", [{}, KEYS], indirect=True)
@each_case("control", CONTROLS)
async def test_control_characters_in_paths_are_refused(served: Served, control: str) -> None:
    body = orjson.dumps({"messages": HELLO})
    for method, path in (("POST", CHAT), ("GET", "/v1/models/x"), ("GET", "/health"), ("GET", "/nowhere")):
        status, answer = await send(served, method, path + control, body, "first")
        assert status == 400
        error = orjson.loads(answer)["error"]
        assert error["code"] == "invalid_path"
        assert repr(path)[:-1] in error["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize("served", [{"allowed_origins": ("https://a.example",), **KEYS}], indirect=True)
async def test_cors_lets_the_named_origins_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(served.engine, "generate", None)
    authorized = {"origin": "https://a.example", "authorization": "Bearer first"}
    broken = await served.post(CHAT, {"messages": HELLO}, headers=authorized)
    assert (broken.status, broken.headers["access-control-allow-origin"]) == (500, "https://a.example")
    other = await served.get("/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


async def test_without_origins_there_is_no_cors(served: Served) -> None:
    answer = await served.get("/health", headers={"origin": "https://a.example"})
    assert "access-control-allow-origin" not in answer.headers


@each_case(
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
)
def test_wrong_configurations_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**fields)  # type: ignore[arg-type]


OTHERS = ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example.", "0x7f.1")


@each_case(
    "host", ["localhost", "LOCALHOST.:80", "a.localhost", "127.0.0.2:1", "[::1]:8000", "10.0.0.1", "box"]
)
async def test_without_keys_a_server_answers_under_names_that_no_stranger_has(
    served: Served, host: str
) -> None:
    assert (await served.get("/v1/models", headers={"host": host})).status == 200


@each_case("host", OTHERS)
async def test_a_page_of_a_stranger_does_not_reach_it_under_its_own_name(served: Served, host: str) -> None:
    for path in ("/v1/models", "/", "/metrics"):
        answer = await served.get(path, headers={"host": host})
        assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    answer = await served.post("/v1/messages", {}, headers={"host": host})
    assert answer.json["error"]["type"] == "permission_error"


@pytest.mark.parametrize(
    "served", [{"allowed_hosts": ("Chat.example",)}, {"allowed_hosts": ("*",)}, KEYS], indirect=True
)
async def test_names_can_be_allowed_and_keys_need_none(served: Served) -> None:
    headers = {"host": "chat.EXAMPLE:443", "authorization": "Bearer first"}
    assert (await served.get("/v1/models", headers=headers)).status == 200


def test_names_count_where_anybody_may_come_in_and_where_they_are_given() -> None:
    assert ServerConfig(host="0.0.0.0").answered_hosts is None
    assert ServerConfig(host="::1").answered_hosts is not None
    assert ServerConfig(host="localhost", fleet_key="k").answered_hosts is not None
    named = ServerConfig(host="0.0.0.0", api_keys=("k",), allowed_hosts=("a.example",)).answered_hosts
    assert named is not None
    assert "a.example" in named
