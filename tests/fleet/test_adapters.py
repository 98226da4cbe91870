"""LoRA adapters of a fleet: each replica has all of them, whenever it came."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from onbeat.cluster.client import FleetClient
from onbeat.core.errors import ConfigError
from onbeat.core.protocols import Delivery
from onbeat.core.request import Request
from tests.cpu.server.running import Answer, Served, serving
from tests.fakes_engine import FakeEngine
from tests.fleet.fleets import fleet_of, lives_of, send_signal
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("comparators")

BODY = {"prompt": "x", "max_tokens": 20, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
KEY = {"authorization": "Bearer key"}


@asynccontextmanager
async def served_fleet(
    num_replicas: int, *modules: tuple[str, str], max_loras: int = 2, **options: Any
) -> AsyncIterator[tuple[Served, FleetClient]]:
    fleet = fleet_of(num_replicas, lora_modules=modules, max_loras=max_loras, router="round-robin", **options)
    async with (
        fleet as client,
        serving(cast(FakeEngine, client), has_fleet=True, fleet_key="key") as served,
    ):
        yield served, client


async def load(served: Served, name: str, path: str = "somewhere", **fields: Any) -> Answer:
    body = {"lora_name": name, "lora_path": path, **fields}
    return await served.post("/v1/load_lora_adapter", body, headers=KEY)


async def unload(served: Served, name: str) -> Answer:
    return await served.post("/v1/unload_lora_adapter", {"lora_name": name}, headers=KEY)


async def tokens(served: Served, model: str, **fields: Any) -> list[int]:
    answer = await served.post("/v1/completions", {**BODY, "model": model, **fields})
    assert (answer.status, answer.json["model"]) == (200, model)
    return list(answer.json["choices"][0]["token_ids"])


async def test_every_replica_answers_with_the_adapter_that_is_asked_for() -> None:
    async with served_fleet(2, ("first", "somewhere")) as (served, client):
        plain = await tokens(served, "fake")
        changed = [token + 1 for token in plain]
        assert (await load(served, "second")).status == 200
        for name in ("first", "second") * 2:  # by turns on both replicas
            assert await tokens(served, name) == changed
        assert await tokens(served, "fake") == plain
        cards = (await served.get("/v1/models")).json["data"]
        parents = {card["id"]: card.get("parent") for card in cards}
        assert parents == {"fake": None, "first": "fake", "second": "fake"}
        assert (await served.get("/v1/models/second")).json["root"] == "somewhere"
        for replica in ("r0", "r1"):
            send_signal(client, replica, signal.SIGKILL)
        await until(lambda: lives_of(client, "r0") == lives_of(client, "r1") == 2 and client.is_ready)
        for name in ("first", "second") * 2:
            assert await tokens(served, name) == changed


async def test_each_way_to_ask_takes_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_fleet(1, ("first", "somewhere"), step_seconds=0.0) as (served, client):
        asked: list[Request] = []
        generate = client.generate

        def noted(request: Request) -> AsyncGenerator[Delivery, None]:
            asked.append(request)
            return generate(request)

        monkeypatch.setattr(client, "generate", noted)
        talk = {"model": "first", "max_tokens": 3, "messages": [{"role": "user", "content": "x"}]}
        bodies = {
            "/v1/completions": {**BODY, "model": "first", "n": 2},
            "/v1/chat/completions": talk,
            "/v1/messages": talk,
            "/v1/responses": {"model": "first", "input": "x", "max_output_tokens": 3},
            "/v1/embeddings": {"model": "first", "input": "x"},
        }
        for path, body in bodies.items():
            await served.post(path, body)
        assert len(asked) == 6
        assert {request.adapter and request.adapter.name for request in asked} == {"first"}


async def test_what_cannot_be_loaded_is_named_and_the_rest_goes_on() -> None:
    async with served_fleet(2, max_loras=1) as (served, _):
        answer = await load(served, "first", "bad/path")
        assert (answer.status, answer.error["code"], answer.error["param"]) == (
            *(400, "adapter_not_loaded", "lora_path"),
        )
        assert "bad/path" in answer.error["message"]
        answer = await served.post("/v1/completions", {**BODY, "model": "first"})
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert (await load(served, "first")).status == 200
        for body, code in (
            ({"name": "first"}, "invalid_value"),
            ({"name": "fake"}, "invalid_value"),
            ({"name": "second"}, "too_many_adapters"),
        ):
            answer = await load(served, **body)
            assert (answer.status, answer.error["code"]) == (400, code)
        assert (await load(served, "first", load_inplace=True)).status == 200
        assert (await unload(served, "second")).status == 404
        assert (await unload(served, "first")).status == 200
        assert (await served.post("/v1/completions", {**BODY, "model": "first"})).status == 404
        assert (await load(served, "second")).status == 200
        answer = await served.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
        assert answer.status == 401


async def test_a_running_request_keeps_its_adapter() -> None:
    async with served_fleet(1, ("first", "somewhere"), max_loras=1, step_seconds=0.01) as (served, client):
        running = asyncio.create_task(tokens(served, "first", max_tokens=300))
        await until(lambda: any(view.num_streaming for view in client.replicas()))
        assert (await unload(served, "first")).status == 200
        answer = await load(served, "second")
        assert (answer.status, answer.error["code"]) == (400, "too_many_adapters")
        last = (await running)[-1]
        assert (await load(served, "second")).status == 200
        assert (await tokens(served, "second", max_tokens=300))[-1] == last


async def test_another_keeper_has_the_adapters_that_gates_know() -> None:
    async with served_fleet(2, ("first", "somewhere")) as (served, client):
        assert (await load(served, "second")).status == 200
        adapters = client.controller.adapters
        loaded = dict(adapters.by_name)
        adapters.by_name, adapters._last_number = {}, 0  # as another one begins
        await client._load_first_adapters()
        assert list(adapters.by_name) == ["first"]
        adapters.restore(loaded)
        adapters.restore({"first": loaded["first"]})  # of a gate that has yet to hear of the second one
        for name in ("first", "second") * 2:  # by turns on both replicas
            assert await tokens(served, name) == await tokens(served, "first")
        assert (await load(served, "third")).error["code"] == "too_many_adapters"


async def test_a_server_does_not_start_with_an_adapter_that_cannot_be_loaded() -> None:
    fleet = fleet_of(1, lora_modules=[("first", "bad")], max_loras=1)
    with pytest.raises(ConfigError, match="first"):
        await fleet.start()


async def test_a_server_without_adapters_has_no_such_path() -> None:
    async with served_fleet(1, max_loras=0) as (served, _):
        assert (await load(served, "first")).status == 404
