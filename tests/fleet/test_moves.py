"""Streams move between replicas while they run, with their KV, and lose nothing whatever happens then."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from onbeat.cluster.client import FleetClient
from onbeat.cluster.streams import OpenRequest
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import MoveStep
from tests.fake_runner import build_fake_engine
from tests.fleet.fleets import (
    RemoteLauncher,
    check_all,
    fleet_of,
    is_ready,
    lives_of,
    make_request,
    pid_of,
    start_requests,
    state_of,
)
from tests.owners import check_owners, num_moved
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("comparators")


def moving_fleet(num_replicas: int, **options: Any) -> FleetClient:
    values = {"keeps_kv": True, "reports_load": True, "step_seconds": 0.01, **options}
    return fleet_of(num_replicas, **values)


def have_begun(client: FleetClient, count: int) -> bool:
    return sum(view.num_streaming for view in client.replicas()) == count


def at_step(client: FleetClient, verb: MoveVerb, do: Callable[[MoveStep], None]) -> list[MoveStep]:
    """Do something once, just before a step of a move is asked for; return the list that will have it."""
    moves = client.controller._moves
    found: list[MoveStep] = []
    carry_out = moves.do

    def watched(step: MoveStep, request: OpenRequest | None) -> None:
        if step.verb is verb and not found:
            found.append(step)
            do(step)
        carry_out(step, request)

    moves.do = watched  # type: ignore[method-assign]
    return found


async def test_a_replica_that_drains_moves_what_runs_there() -> None:
    async with moving_fleet(2) as client:
        started = start_requests(client, 20, max_tokens=150)
        await until(partial(have_begun, client, 20))
        await client.drain("r0", seconds=600, restarts=False)
        await until(lambda: state_of(client, "r0") == "stopped")
        await check_all(started)
        assert num_moved(client.counts) == 10
        assert client.counts.num_resumed == 0, "nothing was computed again"
        assert client.counts.num_moved_bytes > 0
        assert client.counts.move_gap.count == 10
        check_owners(client._fleet)


@pytest.mark.slow
async def test_moves_between_machines() -> None:
    async with moving_fleet(2, launcher=RemoteLauncher()) as client:
        started = start_requests(client, 4, max_tokens=200)
        await until(partial(have_begun, client, 4))
        await client.drain("r1", seconds=60, restarts=False)
        await until(lambda: state_of(client, "r1") == "stopped")
        await check_all(started)
        assert num_moved(client.counts) == 2
        assert client.counts.num_resumed == 0


@pytest.mark.slow
async def test_without_a_way_to_copy_streams_end_where_they_are() -> None:
    async with moving_fleet(2, moves_kv=False) as client:
        started = start_requests(client, 4, max_tokens=100)
        await until(partial(have_begun, client, 4))
        await client.drain("r1", seconds=60, restarts=False)
        await check_all(started)
        await until(lambda: state_of(client, "r1") == "stopped")
        assert num_moved(client.counts) == client.counts.num_resumed == 0


STAGES = [
    (verb, victim)
    for verb in (MoveVerb.RESERVE, MoveVerb.HOLD, MoveVerb.PULL, MoveVerb.FREEZE, MoveVerb.ADOPT)
    for victim in ("source", "destination")
]


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "victim"), STAGES)
async def test_a_death_at_any_stage_loses_nothing(verb: MoveVerb, victim: str) -> None:
    async with moving_fleet(2) as client:
        started = start_requests(client, 6, max_tokens=300)
        await until(partial(have_begun, client, 6))
        killed = "r0" if victim == "source" else "r1"
        process_id = pid_of(client, killed)
        seen = at_step(client, verb, lambda _: os.kill(process_id, signal.SIGKILL))
        await client.drain("r0", seconds=60, restarts=True)
        await until(lambda: seen)
        await check_all(started)
        assert client.counts.num_failed == 0
        await until(partial(_is_back, client, killed), timeout=20)
        check_owners(client._fleet)
        await check_all(start_requests(client, 4, "later"))
        await until(partial(_is_empty, client))


@pytest.mark.slow
@pytest.mark.parametrize("verb", [MoveVerb.PULL, MoveVerb.FREEZE, MoveVerb.ADOPT, MoveVerb.TAKE])
async def test_who_goes_away_during_a_move_leaves_nothing_behind(verb: MoveVerb) -> None:
    async with moving_fleet(2) as client:
        closed = asyncio.create_task(_tokens(client, "closed"))
        other = asyncio.create_task(_tokens(client, "other"))
        await until(partial(have_begun, client, 2))

        def leave(step: MoveStep) -> None:
            (closed if step.request_id == "closed" else other).cancel()

        for replica in ("r0", "r1"):
            at_step(client, verb, leave)
            await client.drain(replica, seconds=60, restarts=True)
            await until(partial(_is_back, client, replica))
        await asyncio.wait({other})
        assert not client.streams.open
        check_owners(client._fleet)
        await check_all(start_requests(client, 4, "later", max_tokens=5))
        await until(partial(_is_empty, client))


def _is_back(client: FleetClient, replica: str) -> bool:
    return lives_of(client, replica) == 2 and is_ready(client, replica)


def _is_empty(client: FleetClient) -> bool:
    """Whether no replica keeps a block."""
    return all(
        view.load is not None
        and view.limits is not None
        and view.load.num_free_blocks == view.limits.num_blocks
        for view in client.replicas()
    )


async def _tokens(client: FleetClient, name: str) -> int:
    request = make_request(name, max_tokens=900)
    return sum([len(delivery.output.new_token_ids) async for delivery in client.generate(request)])


@pytest.mark.slow
async def test_a_destination_that_stands_still_holds_no_stream_up() -> None:
    async with moving_fleet(2) as client:
        started = start_requests(client, 4, max_tokens=200)
        await until(partial(have_begun, client, 4))
        process_id = pid_of(client, "r1")
        at_step(client, MoveVerb.ADOPT, lambda _: os.kill(process_id, signal.SIGSTOP))
        await client.drain("r0", seconds=60, restarts=True)
        await check_all(started)
        assert client.counts.num_failed == 0


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "why"), [("mend", "memory"), ("llumnix", "balance")])
async def test_streams_leave_a_replica_that_runs_out_of_memory_for_a_new_one(rule: str, why: str) -> None:
    async with moving_fleet(1, num_blocks=96, move_rule=rule, router="freeness") as client:
        started = start_requests(client, 7, num_prompt=110, max_tokens=300)
        await until(partial(have_begun, client, 7))
        await client.scale(2)
        await check_all(started)
        assert client.counts.moves[why, "moved"] >= 1
        if rule == "llumnix":  # mend also sends elsewhere what was preempted, and has nothing to move
            assert client.counts.num_resumed == 0
        check_owners(client._fleet)


async def test_streams_do_not_move_between_unlike_blocks(caplog: pytest.LogCaptureFixture) -> None:
    def make_build(replica: str, _life: int):
        backend = "other" if replica == "r1" else "fake"
        return partial(build_fake_engine, step_seconds=0.005, keeps_kv=True, kv_backend=backend)

    async with fleet_of(3, make_build=make_build) as client:
        moves = {view.replica: view.limits and view.limits.moves_streams for view in client.replicas()}
        assert moves == {"r0": True, "r1": False, "r2": True}
    assert "differ in backend" in caplog.text


@pytest.mark.slow
async def test_what_waits_for_blocks_begins_where_there_is_room() -> None:
    """With streams too short to be moved for their tokens alone, and an idle replica that comes later."""
    async with moving_fleet(1, num_blocks=64, router="freeness") as client:
        # 64 blocks hold 1,024 tokens: one of these streams at a time, and the others wait or are preempted.
        started = start_requests(client, 4, num_prompt=40, max_tokens=800)
        await until(partial(have_begun, client, 4))
        await client.scale(2)
        await until(partial(is_ready, client, "r1"), timeout=60)
        assert any(view.num_outstanding > 1 for view in client.replicas()), "it came too late for this test"
        # With its KV, as it is about to be preempted, or without, once it waits.
        await until(lambda: all(view.num_outstanding for view in client.replicas()))
        await check_all(started, timeout=120)
        assert client.counts.num_failed == 0
        check_owners(client._fleet)
