"""Replicas die, hang and leave: streams go on elsewhere without a lost or doubled token."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import pytest

from onbeat.cluster import processes
from onbeat.cluster.local_launcher import LocalLauncher
from onbeat.core.errors import ConfigError, EngineDead, EngineError, Overloaded
from onbeat.core.hang import HangLimits
from onbeat.core.request import WholeRequest
from tests.fake_runner import build_fake_engine
from tests.fleet.fleets import (
    check_all,
    collect,
    expected_tokens,
    fleet_of,
    has_lives,
    is_ready,
    is_there,
    lives_of,
    make_request,
    pid_of,
    send_signal,
    start_requests,
    state_of,
)
from tests.owners import check_owners, owner_of
from tests.waiting import until


async def test_routed_streams_are_whole_and_spread_evenly() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 12)
        await until(lambda: all(view.num_streaming == 6 for view in client.replicas()))
        await check_all(started)
        assert not client.streams.open
        assert all(view.num_outstanding == 0 for view in client.replicas())
        check_owners(client._fleet)


async def test_streams_of_a_killed_replica_go_on_at_once_and_it_comes_back() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 8, max_tokens=200)  # none ends before the kill on a busy machine
        await until(lambda: all(view.num_streaming == 4 for view in client.replicas()))
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: state_of(client, "r0") == "starting", timeout=3)
        assert state_of(client, "r1") == "ready"
        await check_all(started)
        assert client.counts.num_resumed == 4
        assert client.counts.num_resumed_tokens > 0
        assert client.counts.num_failed == 0
        assert client.counts.lost == {"r0": 1}
        await until(lambda: state_of(client, "r0") == "ready")
        assert lives_of(client, "r0") == 2
        await check_all(start_requests(client, 4, "later"))


@pytest.mark.slow
async def test_replicas_killed_in_turn_under_load_lose_nothing() -> None:
    async with fleet_of(3) as client:
        names = (f"s{number}" for number in itertools.count())
        broken: list[str] = []
        is_over = False

        async def keep_asking() -> int:
            num_whole = 0
            while not is_over:
                request = make_request(next(names), max_tokens=40)
                if await collect(client, request) != expected_tokens(request):
                    broken.append(request.request_id)
                num_whole += 1
            return num_whole

        users = [asyncio.create_task(keep_asking()) for _ in range(9)]
        for number in range(6):
            # All are back: on a slow machine a request would else meet a third death, which ends it.
            for replica in ("r0", "r1", "r2"):
                await until(partial(is_ready, client, replica))
            await asyncio.sleep(0.2)
            send_signal(client, f"r{number % 3}", signal.SIGKILL)
        is_over = True
        assert sum(await asyncio.gather(*users)) > 9
        assert not broken
        assert client.counts.num_resumed > 6
        check_owners(client._fleet)


@pytest.mark.slow
@pytest.mark.alone
async def test_a_stopped_replica_is_given_up_and_does_not_come_back() -> None:
    async with fleet_of(2) as client:
        started = start_requests(client, 4, max_tokens=900)
        await until(lambda: all(view.num_streaming == 2 for view in client.replicas()))
        stopped = time.monotonic()
        process_id = send_signal(client, "r0", signal.SIGSTOP)
        await until(lambda: state_of(client, "r0") == "starting", timeout=4)
        assert 1.5 < time.monotonic() - stopped < 3.5
        await until(lambda: not is_there(process_id))
        await check_all(started)


@pytest.mark.alone
async def test_a_replica_whose_step_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMITS", HangLimits(silence_seconds=inf, step_seconds=0.6))

    def make_build(replica: str, life: int):
        is_stuck = (replica, life) == ("r0", 0)
        return partial(build_fake_engine, step_seconds=6.0 if is_stuck else 0.005)

    async with fleet_of(2, make_build=make_build) as client:
        started = start_requests(client, 4)
        await until(lambda: state_of(client, "r0") == "starting", timeout=5)
        await check_all(started)


@contextmanager
def spinning(core: int) -> Iterator[None]:
    """Keep a core busy."""
    spinner = "import os\nwhile True: pass"
    programs = [subprocess.Popen([sys.executable, "-c", spinner]) for _ in range(3)]
    for each in programs:
        os.sched_setaffinity(each.pid, {core})
    try:
        yield
    finally:
        for each in programs:
            each.kill()
            each.wait()


class OneCoreLauncher(LocalLauncher):
    """Starts all processes on one core."""

    def __init__(self) -> None:
        self.core = min(os.sched_getaffinity(0))
        super().__init__([(self.core,)])


@pytest.mark.slow
async def test_a_starved_engine_is_slow_and_not_hung(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "LIMITS", HangLimits(silence_seconds=6.0, step_seconds=6.0))
    launcher = OneCoreLauncher()
    async with fleet_of(1, launcher=launcher, step_seconds=0.3, burns=True, niceness=10) as client:
        with spinning(launcher.core):
            started = start_requests(client, 1, max_tokens=1)
            await check_all(started, timeout=300)
        assert client.counts.lost == {}
    assert "r0 is slow" in caplog.text


@pytest.mark.slow
async def test_a_deadlock_is_a_hang_on_a_busy_core_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LIMITS", HangLimits(step_seconds=4.0))
    launcher = OneCoreLauncher()

    def make_build(_replica: str, life: int):
        return partial(build_fake_engine, step_seconds=0.005 if life else 600.0, niceness=0 if life else 5)

    async with fleet_of(1, launcher=launcher, make_build=make_build) as client:
        with spinning(launcher.core):
            started = start_requests(client, 1, max_tokens=2)
            await until(lambda: state_of(client, "r0") == "starting", timeout=60)
        await check_all(started, timeout=60)


async def test_the_only_replica_comes_back_and_its_streams_go_on() -> None:
    async with fleet_of(1) as client:
        started = start_requests(client, 3, max_tokens=200)
        await until(lambda: client.replicas()[0].num_streaming == 3)
        send_signal(client, "r0", signal.SIGKILL)
        await until(lambda: not client.is_alive, timeout=3)
        assert client.seconds_to_ready is not None
        late = start_requests(client, 2, "late")
        await check_all([*started, *late])
        assert client.is_alive
        assert client.counts.num_resumed == 3


async def test_a_request_that_is_not_to_be_resumed_ends_with_an_error() -> None:
    async with fleet_of(2) as client:
        frail = asyncio.create_task(collect(client, make_request("frail", max_tokens=500, resumes=False)))
        started = start_requests(client, 3, max_tokens=200)
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 4)
        owner = owner_of(client._fleet, "frail")
        assert owner is not None
        send_signal(client, owner, signal.SIGKILL)
        with pytest.raises(EngineError, match="resumed"):
            await frail
        await check_all(started)
        assert client.counts.num_failed == 1


async def test_a_request_that_kills_its_replicas_is_given_up() -> None:
    async with fleet_of(3) as client:
        started = start_requests(client, 3, max_tokens=300)
        with pytest.raises(EngineError, match="cause"):
            await collect(client, make_request("dead"))
        await check_all(started)


async def test_streams_outlive_replicas_that_are_killed_in_one_moment() -> None:
    async with fleet_of(4) as client:
        started = start_requests(client, 48, max_tokens=300)
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 48)
        for replica in ("r0", "r1", "r2", "r3"):
            send_signal(client, replica, signal.SIGKILL)
        await check_all(started, timeout=60)
        assert client.counts.num_failed == 0
        check_owners(client._fleet)


async def test_a_replica_that_dies_again_and_again_stays_down() -> None:
    async with fleet_of(1) as client:
        for life in range(1, 4):
            await until(partial(has_lives, client, "r0", life), timeout=15)
            send_signal(client, "r0", signal.SIGKILL)
            await until(lambda: state_of(client, "r0") != "ready")
        await until(lambda: state_of(client, "r0") == "down")
        assert client.seconds_to_ready is None
        assert not client.is_alive
        with pytest.raises(Overloaded, match="no replica"):
            await collect(client, make_request("late"))
        await client.scale(1)
        await until(lambda: client.is_ready)
        await check_all(start_requests(client, 2, "again"))


async def test_an_engine_that_says_why_it_dies_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    async with fleet_of(2) as client:
        with pytest.raises(EngineError):
            await collect(client, make_request("dead"))
    assert "lost: rank 1" in caplog.text


async def test_ended_and_aborted_requests_leave_nothing_behind() -> None:
    async with fleet_of(2) as client:
        stream = client.generate(make_request("closed", max_tokens=900))
        await anext(stream)
        await stream.aclose()
        task = asyncio.create_task(collect(client, make_request("cancelled", max_tokens=900)))
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 1)
        task.cancel()
        await asyncio.wait({task})
        assert not client.streams.open
        assert not client.streams.by_name
        check_owners(client._fleet)


async def test_no_process_is_left() -> None:
    async with fleet_of(2) as client:
        process_ids = [pid_of(client, replica) for replica in ("r0", "r1")]
        os.kill(process_ids[1], signal.SIGSTOP)
        tasks = start_requests(client, 2, max_tokens=900)
        await asyncio.sleep(0.1)
        for _, task in tasks:
            task.cancel()
    assert not any(map(is_there, process_ids))


def _refuses(replica: str, _life: int):
    return partial(build_fake_engine, policy="fifo" if replica == "r1" else "sarathi")


async def test_a_replica_that_cannot_start_ends_the_start_of_all() -> None:
    client = fleet_of(2, make_build=_refuses)
    with pytest.raises(ConfigError, match="policy 'fifo'"):
        await client.start()
    assert not client.controller.lives


async def test_a_refusal_for_the_load_is_tried_elsewhere() -> None:
    async with fleet_of(2, step_seconds=0.05, max_num_seqs=1, max_num_queued_reqs=1) as client:
        started = start_requests(client, 2, max_tokens=20)
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 2)
        started += start_requests(client, 2, "waiting", max_tokens=20)
        await until(lambda: sum(view.num_outstanding for view in client.replicas()) == 4)
        with pytest.raises(Overloaded, match="max_num_queued_reqs"):
            await collect(client, make_request("one too many"))
        await check_all(started)


@pytest.mark.parametrize("num_replicas", [1, 2])
async def test_an_idle_fleet_takes_as_many_choices_as_its_replicas_can(num_replicas: int) -> None:
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_num_queued_reqs": 1}
    number = 3 * num_replicas
    async with fleet_of(num_replicas, router="round-robin", step_seconds=0.02, **limits) as client:
        whole = WholeRequest("a", number, 5 * number)
        await check_all(start_requests(client, number, "a", max_tokens=20, whole=whole))
        busy = start_requests(client, number, "b", max_tokens=40, whole=whole._replace(whole_id="b"))
        await until(lambda: sum(view.num_streaming for view in client.replicas()) == 2 * num_replicas)
        with pytest.raises(Overloaded, match="max_num_queued_reqs") as caught:
            await collect(client, make_request("one too many"))
        assert caught.value.reason == "queue_full", "whenever it may be tried again"
        await check_all(busy)


def _sleeps_for_ever(_on_progress):
    time.sleep(600)


async def test_a_replica_that_never_gets_ready_is_given_up() -> None:
    client = fleet_of(1, make_build=lambda _replica, _life: _sleeps_for_ever)
    client.controller.processes.start_timeout = 3.0
    with pytest.raises(EngineDead, match=r"r0 .* for 3 s"):
        await client.start()
    assert not client.controller.lives
