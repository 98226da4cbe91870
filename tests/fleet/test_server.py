"""A server before a fleet: health, the routes of the fleet, metrics, and what a request may ask for."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NoReturn, cast

import pytest

from onbeat.cluster import local_launcher
from onbeat.cluster.client import FleetClient
from onbeat.engine.container import FreeMemory
from onbeat.engine.link import BuildEngine
from onbeat.scheduler.cluster.scaling import ScaleBounds
from tests.cpu.server.running import Answer, Served, parse_events, serving
from tests.fake_runner import build_fake_engine
from tests.fakes_engine import FakeEngine
from tests.fleet.fleets import fleet_of, has_lives, lives_of, send_signal, state_of
from tests.many_cases import each_case
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("comparators")

BODY = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "temperature": 0}


KEY = "of the fleet"
CARRIED = {"authorization": f"Bearer {KEY}"}


@asynccontextmanager
async def served_fleet(
    num_replicas: int, *, fleet_key: str | None = KEY, **fields: Any
) -> AsyncIterator[tuple[Served, FleetClient]]:
    async with (
        fleet_of(num_replicas, step_seconds=0.01) as client,
        serving(cast(FakeEngine, client), has_fleet=True, fleet_key=fleet_key, **fields) as served,
    ):
        yield served, client


async def ask(served: Served, path: str, body: dict[str, Any] | None = None) -> Answer:
    """Ask the fleet with its key: show it, or with a body change it."""
    if body is None:
        return await served.get(path, headers=CARRIED)
    return await served.post(path, body, headers=CARRIED)


async def metrics(served: Served) -> dict[str, float]:
    text = (await served.get("/metrics")).body.decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


async def test_an_answer_is_the_same_through_the_death_of_its_replica() -> None:
    async with served_fleet(2) as (served, client):
        whole = (await served.post("/v1/completions", BODY)).json
        answer = asyncio.create_task(served.post("/v1/completions", BODY))
        await until(lambda: any(view.num_streaming for view in client.replicas()))
        owner = next(view.replica for view in client.replicas() if view.num_streaming)
        send_signal(client, owner, signal.SIGKILL)
        resumed = await answer
        assert resumed.status == 200
        assert resumed.json["choices"] == whole["choices"]
        assert resumed.json["usage"] == whole["usage"]
        await until(lambda: client.is_ready and lives_of(client, owner) == 2)
        values = await metrics(served)
        assert values["onbeat_fleet_resumed_total"] == 1
        assert values["onbeat_fleet_resumed_tokens_total"] >= 1
        assert values["onbeat_fleet_lost_total"] == 0
        assert values[f'onbeat_fleet_replicas_lost_total{{engine="{owner}"}}'] == 1
        assert values['onbeat_fleet_replicas{state="ready"}'] == 2
        assert values[f'onbeat_replica_lives{{engine="{owner}"}}'] == 2
        assert values["onbeat_output_tokens_total"] == 120
        assert values["onbeat_kv_blocks_used"] == 0


async def test_who_does_not_want_to_be_resumed_hears_of_the_death() -> None:
    body = {**BODY, "max_tokens": 900, "resume": False}
    async with served_fleet(2) as (served, client):
        plain = asyncio.create_task(served.post("/v1/completions", body))
        stream = asyncio.create_task(served.post("/v1/completions", {**body, "stream": True}))
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 2)
        for replica in ("r0", "r1"):
            send_signal(client, replica, signal.SIGKILL)
        answer = await plain
        assert (answer.status, answer.error["code"]) == (500, "engine_error")
        assert parse_events((await stream).body)[-2]["error"]["code"] == "engine_error"


async def test_a_wrong_wish_is_refused() -> None:
    async with served_fleet(1) as (served, _):
        answer = await served.post("/v1/completions", {**BODY, "resume": "maybe"})
        assert (answer.status, answer.error["param"]) == (400, "resume")


async def test_health_follows_the_only_replica() -> None:
    async with served_fleet(1) as (served, client):
        assert (await served.get("/health")).status == 200
        assert (await served.get("/ready")).status == 200
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: not client.is_alive)
        answer = await served.get("/ready")
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert "r0 is starting" in answer.error["message"]
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await served.get("/health")).status == 200, "a liveness probe would end what comes back"
        await until(lambda: client.is_ready)
        assert (await served.get("/ready")).status == 200


async def test_health_outlasts_a_replica_that_hangs() -> None:
    async with served_fleet(1) as (served, client):
        send_signal(client, "r0", signal.SIGSTOP)
        seen = set()
        while lives_of(client, "r0") < 2:
            seen.add(((await served.get("/health")).status, (await served.get("/ready")).status))
            await asyncio.sleep(0.05)
        assert seen == {(200, 200), (200, 503)}


def _starts_once(_replica: str, life: int) -> BuildEngine:
    return cast(BuildEngine, _sleeps if life else build_fake_engine)


def _sleeps(_on_progress: Callable[[str], None]) -> NoReturn:
    time.sleep(600)
    raise AssertionError("it is killed before")


async def test_a_request_waits_for_a_start_no_longer_than_may_be() -> None:
    async with (
        fleet_of(1, make_build=_starts_once, max_wait_seconds=2.0) as client,
        serving(cast(FakeEngine, client), has_fleet=True) as served,
    ):
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: not client.is_alive)
        async with asyncio.timeout(30):
            answer = await served.post("/v1/completions", BODY)
        assert (answer.status, answer.error["code"]) == (503, "no_replica")
        assert int(answer.headers["Retry-After"]) >= 1


async def test_health_says_that_a_replica_stays_down() -> None:
    async with served_fleet(1) as (served, client):
        for life in range(1, 4):
            await until(partial(has_lives, client, "r0", life), timeout=15)
            send_signal(client, "r0", signal.SIGKILL)
            await until(lambda: state_of(client, "r0") != "ready")
        answer = await served.get("/health")
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        assert "r0 is down" in answer.error["message"]
        refused = await served.post("/v1/completions", BODY)
        assert refused.status == 503
        assert (await ask(served, "/fleet/scale", {"replicas": 1})).status == 200
        await until(lambda: client.is_ready)
        assert (await served.post("/v1/completions", BODY)).status == 200


async def test_the_fleet_is_shown_and_changed() -> None:
    async with served_fleet(2) as (served, client):
        shown = (await ask(served, "/fleet")).json
        assert [row["replica"] for row in shown["replicas"]] == ["r0", "r1"]
        assert [row["state"] for row in shown["replicas"]] == ["ready", "ready"]
        assert shown["replicas"][0]["limits"]["block_size"] == 16
        running = asyncio.create_task(served.post("/v1/completions", BODY))
        await until(lambda: any(view.num_streaming for view in client.replicas()))
        for replica in ("r0", "r1"):
            answer = await ask(served, "/fleet/drain", {"replica": replica, "restart": True})
            assert answer.status == 200
            assert {row["replica"]: row["state"] for row in answer.json["replicas"]}[replica] != "ready"
        assert (await running).status == 200
        await until(lambda: all(lives_of(client, replica) == 2 for replica in ("r0", "r1")))
        assert (await ask(served, "/fleet/scale", {"replicas": 1})).status == 200
        await until(lambda: len(client.replicas()) == 1)
        assert (await ask(served, "/fleet/restart", {})).status == 200
        await until(lambda: lives_of(client, client.replicas()[0].replica) == 3)


@pytest.fixture
async def fleet_with_key() -> AsyncIterator[tuple[Served, FleetClient]]:
    async with served_fleet(1) as found:
        yield found


@each_case(
    ("path", "body", "param"),
    [
        ("/fleet/drain", {"replica": "r7"}, "replica"),
        ("/fleet/drain", {"replica": "r0", "timeout": -1}, "timeout"),
        ("/fleet/drain", {}, "replica"),
        ("/fleet/drain", {"replca": "r0"}, "replca"),
        ("/fleet/scale", {"replicas": 0}, "replicas"),
        ("/fleet/scale", {"replicas": -1}, "replicas"),
        ("/fleet/scale", {"replicas": 10**6}, "replicas"),
        ("/fleet/scale", {"replicas": "two"}, "replicas"),
        ("/fleet/scale", {"replicas": 1, "max_replicas": 2}, "max_replicas"),
        ("/fleet/scale", {"replicas": 1, "user": "me"}, "user"),
        ("/fleet/drain", {"replica": "r0", "restarts": True}, "restarts"),
        ("/fleet/restart", {"timeout": 3}, "timeout"),
        ("/fleet/restart", {f"z{number}": 1 for number in range(60_000)}, "z0"),
    ],
)
async def test_bad_wishes_are_refused(
    fleet_with_key: tuple[Served, FleetClient], path: str, body: dict[str, Any], param: str
) -> None:
    served, client = fleet_with_key
    answer = await ask(served, path, body)
    assert (answer.status, answer.error["param"]) == (400, param)
    assert state_of(client, "r0") == "ready"


async def test_the_last_replica_is_not_drained_for_good(
    fleet_with_key: tuple[Served, FleetClient],
) -> None:
    served, client = fleet_with_key
    refused = await ask(served, "/fleet/drain", {"replica": "r0"})
    assert (refused.status, refused.error["code"]) == (400, "last_replica")
    assert "/fleet/scale" in refused.error["message"]
    assert (await ask(served, "/fleet/drain", {"replica": "r0", "restart": True})).status == 200
    assert (await ask(served, "/fleet/drain", {"replica": "r0"})).error["code"] == "last_replica"
    await until(lambda: lives_of(client, "r0") == 2)
    assert (await ask(served, "/fleet/scale", {"replicas": 2})).status == 200
    assert (await ask(served, "/fleet/drain", {"replica": "r0"})).status == 200, "another one comes"
    assert (await ask(served, "/fleet/drain", {"replica": "r1"})).error["code"] == "last_replica"
    await until(lambda: [view.replica for view in client.replicas()] == ["r1"])


@pytest.fixture
async def fleet_without_key() -> AsyncIterator[tuple[Served, FleetClient]]:
    async with served_fleet(1, fleet_key=None) as found:
        yield found


@each_case(
    "headers",
    [
        {},
        {"via": "1.1 nginx"},
        {"x-real-ip": "8.8.8.8"},
        {"x-forwarded-for": "127.0.0.1"},
        {"origin": "https://evil.example"},  # of another host nothing is answered at all
        {"authorization": "Bearer anything"},
    ],
)
async def test_without_keys_nobody_sees_or_changes_the_fleet(
    fleet_without_key: tuple[Served, FleetClient], headers: dict[str, str]
) -> None:
    served, client = fleet_without_key
    for path, body in (("/fleet/scale", {"replicas": 0}), ("/fleet/restart", {}), ("/fleet/drain", {})):
        answer = await served.post(path, body, headers=headers)
        assert (answer.status, answer.error["code"]) == (403, "forbidden")
        assert "--fleet-key" in answer.error["message"]
    assert (await served.get("/fleet", headers=headers)).status == 403
    assert (await served.post("/v1/completions", {"prompt": "x"}, headers=headers)).status == 200
    assert state_of(client, "r0") == "ready"


@pytest.mark.parametrize("fields", [{}, {"api_keys": ("secret",)}], ids=["open", "with API keys"])
async def test_the_key_of_the_fleet_opens_it_and_no_other_does(fields: dict[str, Any]) -> None:
    async with served_fleet(1, **fields) as (served, _):
        for headers in ({}, {"authorization": "Bearer secret"}, {"authorization": "Bearer wrong"}):
            assert (await served.get("/fleet", headers=headers)).status == 401
            answer = await served.post("/fleet/restart", {}, headers=headers)
            assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
        assert (await ask(served, "/fleet")).status == 200
        assert (await ask(served, "/fleet/scale", {"replicas": 1})).status == 200
        assert (await ask(served, "/v1/models")).status == 200, "it opens the rest too"
        assert (await served.get("/v1/models")).status == (401 if fields else 200)


async def test_without_a_key_of_its_own_api_keys_open_the_fleet() -> None:
    async with served_fleet(1, fleet_key=None, api_keys=("secret",)) as (served, _):
        assert (await served.get("/fleet")).status == 401
        assert (await served.post("/fleet/restart", {})).status == 401
        headers = {"authorization": "Bearer secret", "x-forwarded-for": "10.0.0.1"}
        assert (await served.get("/fleet", headers=headers)).status == 200
        assert (await served.post("/fleet/scale", {"replicas": 1}, headers=headers)).status == 200


async def test_a_fleet_that_scales_itself_takes_bounds_and_numbers() -> None:
    async with (
        fleet_of(1, autoscale="freeness", bounds=ScaleBounds(1, 2)) as client,
        serving(cast(FakeEngine, client), has_fleet=True, fleet_key=KEY) as served,
    ):
        shown = (await ask(served, "/fleet")).json["scaling"]
        assert (shown["policy"], shown["least"], shown["most"], shown["num_wanted"]) == ("freeness", 1, 2, 1)
        assert shown["share"] is None, "memory is all that it looks at"
        answer = await ask(served, "/fleet/scale", {"replicas": 2})
        assert answer.json["scaling"]["least"] == 2
        await until(lambda: state_of(client, "r1") == "ready")
        answer = await ask(served, "/fleet/scale", {"min": 0, "max": 1})
        assert (answer.json["scaling"]["least"], answer.json["scaling"]["most"]) == (0, 1)
        await until(lambda: state_of(client, "r1") == "stopped")
        values = await metrics(served)
        assert values['onbeat_fleet_rescales_total{direction="down",why="bounds"}'] == 1
        assert values["onbeat_fleet_replicas_max"] == 1
        for wrong in ({"min": 3, "max": 2}, {"min": 1}, {"replicas": 1, "max": 2}, {}):
            assert (await ask(served, "/fleet/scale", wrong)).status == 400
        assert (await ask(served, "/fleet/drain", {"replica": "r0"})).status == 200
        await until(lambda: not client.replicas())
        assert (await served.get("/ready")).status == 200
        answer = await served.post("/v1/completions", {"prompt": "x", "max_tokens": 1})
        assert answer.status == 200, "the next request starts one"


async def test_there_are_no_more_replicas_than_the_machine_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        fleet_of(1, autoscale="freeness", bounds=ScaleBounds(1, 2)) as client,
        serving(cast(FakeEngine, client), has_fleet=True, fleet_key=KEY) as served,
    ):
        for body in ({"replicas": 17}, {"min": 1, "max": 17}):
            monkeypatch.setattr(local_launcher, "usable_cores", lambda: 2)
            answer = await ask(served, "/fleet/scale", body)
            assert (answer.status, answer.error["param"]) == (400, "replicas" if len(body) == 1 else "min")
            assert "at most 16 " in answer.error["message"]
        monkeypatch.setattr(local_launcher, "host_memory", lambda: FreeMemory(2**20, "this machine"))
        answer = await ask(served, "/fleet/scale", {"replicas": 2})
        assert answer.status == 400
        assert "0.0 GiB are free" in answer.error["message"]
        assert len(client.replicas()) == 1
        assert (await ask(served, "/fleet/scale", {"replicas": 1})).status == 200, "fewer always have room"


async def test_a_fleet_of_a_fixed_size_takes_no_bounds() -> None:
    async with served_fleet(1) as (served, _):
        assert (await ask(served, "/fleet")).json["scaling"] is None
        answer = await ask(served, "/fleet/scale", {"min": 1, "max": 2})
        assert answer.status == 400
        assert "--autoscale" in answer.json["error"]["message"]
        assert "onbeat_fleet_replicas_wanted" not in await metrics(served)
