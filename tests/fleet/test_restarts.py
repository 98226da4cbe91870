"""Replicas that are told to end, restarted in turn, or of another version."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

import onbeat
from onbeat.cluster import life
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.cluster.roster import Roster
from onbeat.core.errors import ConfigError, InvalidRequest
from onbeat.engine.link import BuildEngine
from tests.fake_runner import build_fake_engine
from tests.fleet.fleets import (
    check_all,
    collect,
    expected_tokens,
    fleet_of,
    is_ready,
    is_there,
    lives_of,
    make_request,
    pid_of,
    send_signal,
    start_requests,
    state_of,
)
from tests.waiting import until


async def test_a_replica_that_is_told_to_end_drains_and_comes_back() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 6, max_tokens=150)
        await until(lambda: all(view.num_streaming == 3 for view in client.replicas()))
        process_id = send_signal(client, "r0", signal.SIGTERM)
        await until(lambda: state_of(client, "r0") == "draining", timeout=3)
        new = start_requests(client, 3, "new")
        await check_all([*started, *new])
        await until(lambda: lives_of(client, "r0") == 2)
        assert not is_there(process_id)
        assert client.counts.num_resumed == 0, "what ran there ended there"
        assert client.counts.lost == {}


async def test_one_that_is_coming_back_keeps_its_place_for_the_next_keeper(tmp_path: Path) -> None:
    roster = Roster(tmp_path, os.getpid())
    async with fleet_of(2, launcher=LocalLauncher(roster=roster)) as client:
        await client.drain("r1", seconds=1.0, restarts=True)
        seen = set()
        while lives_of(client, "r1") < 2:
            seen.add(tuple(roster.places("r")))
            await asyncio.sleep(0.001)
        assert seen == {("r0", "r1")}
        await client.drain("r1", seconds=1.0, restarts=False)
        await until(lambda: roster.places("r") == ["r0"])


async def test_what_does_not_end_in_time_moves() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 4, max_tokens=400)
        await until(lambda: all(view.num_streaming == 2 for view in client.replicas()))
        await client.drain("r1", seconds=0.2, restarts=False)
        await until(lambda: state_of(client, "r1") == "stopped", timeout=3)
        await check_all(started)
        assert client.counts.num_resumed == 2
        assert [view.replica for view in client.replicas()] == ["r0"]


async def test_all_are_started_again_one_after_another_without_an_error() -> None:
    async with fleet_of(2) as client:
        before = {pid_of(client, replica) for replica in ("r0", "r1")}
        is_over = False
        names = (f"s{number}" for number in itertools.count())

        async def keep_asking() -> None:
            while not is_over:
                request = make_request(next(names), max_tokens=30)
                assert await collect(client, request) == expected_tokens(request)

        users = [asyncio.create_task(keep_asking()) for _ in range(6)]
        await client.restart()
        await until(lambda: all(lives_of(client, replica) == 2 for replica in ("r0", "r1")), timeout=20)
        is_over = True
        await asyncio.gather(*users)
        assert not before & {pid_of(client, replica) for replica in ("r0", "r1")}
        assert client.counts.lost == {}


async def test_a_round_of_restarts_goes_on_when_the_replica_it_waits_for_is_scaled_away() -> None:
    async with fleet_of(3) as client:
        started = start_requests(client, 3, max_tokens=400)
        await until(lambda: all(view.num_streaming == 1 for view in client.replicas()))
        await client.restart()
        await until(lambda: state_of(client, "r0") == "draining")
        with pytest.raises(InvalidRequest, match="under way"):
            await client.restart()
        await client.drain("r0", seconds=30, restarts=False)
        await check_all(started)
        await until(lambda: all(lives_of(client, replica) == 2 for replica in ("r1", "r2")), timeout=30)
        assert [view.replica for view in client.replicas()] == ["r1", "r2"]
        await until(lambda: all(is_ready(client, replica) for replica in ("r1", "r2")))
        await client.restart()
        await until(lambda: all(lives_of(client, replica) == 3 for replica in ("r1", "r2")), timeout=30)


async def test_a_round_of_restarts_leaves_alone_what_starts_or_ends_already() -> None:
    async with fleet_of(3) as client:
        started = start_requests(client, 3, max_tokens=400)
        await until(lambda: all(view.num_streaming == 1 for view in client.replicas()))
        await client.drain("r2", seconds=30, restarts=False)
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: state_of(client, "r0") == "starting" and "r0" in client.controller.lives)
        await client.restart()
        await until(lambda: lives_of(client, "r1") == 2, timeout=30)
        await check_all(started)
        await until(lambda: state_of(client, "r2") == "stopped")
        assert lives_of(client, "r0") == 2, "it was new when the round began"


async def test_a_replica_of_another_version_does_not_join(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with fleet_of(1) as client:
        monkeypatch.setattr(life, "__version__", "9.0")  # as if the package had been changed meanwhile
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: state_of(client, "r0") == "down", timeout=60)
        (view,) = client.replicas()
        assert re.search(rf"r0 .* {re.escape(onbeat.__version__)}, .* 9\.0", view.why)
        assert "Restart" in caplog.text
    with pytest.raises(ConfigError, match=r"server 9\.0"):
        await fleet_of(1).start()


def _changed_meanwhile(replica: str, life: int) -> BuildEngine:
    return partial(build_fake_engine, step_seconds=0.005, weights="new" if life else "old")


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_a_replica_with_other_weights_does_not_join(num_replicas: int) -> None:
    async with fleet_of(num_replicas, make_build=_changed_meanwhile) as client:
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: state_of(client, "r0") == "down", timeout=60)
        assert "another weights" in client.replicas()[0].why
        assert client.is_alive is (num_replicas > 1)
        if client.is_alive:
            await check_all(start_requests(client, 2, "other"))


async def test_a_round_of_restarts_ends_where_one_does_not_come_back() -> None:
    async with fleet_of(2, make_build=_changed_meanwhile) as client:
        await client.restart()
        assert client.controller._round is not None
        await until(client.controller._round.done, timeout=60)
        assert (state_of(client, "r0"), state_of(client, "r1")) == ("down", "ready")
        assert lives_of(client, "r1") == 1
        await check_all(start_requests(client, 2))


async def test_a_fleet_grows_and_shrinks() -> None:
    async with fleet_of(1) as client:
        await client.scale(3)
        await until(lambda: sum(view.state == "ready" for view in client.replicas()) == 3)
        started = start_requests(client, 9, max_tokens=80)
        await until(lambda: all(view.num_streaming == 3 for view in client.replicas()))
        await client.scale(1)
        await check_all(started)
        await until(lambda: len(client.replicas()) == 1)
