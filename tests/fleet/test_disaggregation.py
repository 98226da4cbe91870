"""Prompts on one replica, tokens on another: whole streams, also where one of them dies."""

from __future__ import annotations

import signal
from functools import partial
from typing import Any

import pytest

from onbeat.cluster.client import FleetClient
from onbeat.cluster.streams import OpenRequest
from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import MoveStep
from tests.fleet.fleets import (
    check_all,
    collect,
    expected_tokens,
    is_ready,
    lives_of,
    make_request,
    send_signal,
    start_requests,
)
from tests.fleet.test_moves import moving_fleet
from tests.owners import check_owners, num_moved
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("comparators")

LONG = 200
"""Tokens of a prompt that streams would notice."""
CHUNKS = {"max_num_batched_tokens": 32, "max_num_seqs": 16}
"""So that it takes seven steps."""


def num_sent(client: FleetClient, replica: str) -> int:
    return sum(count for (name, _), count in client.counts.routed.items() if name == replica)


async def test_long_prompts_are_computed_on_one_replica_and_go_on_on_the_other() -> None:
    async with moving_fleet(2, num_prefill=1) as client:
        started = start_requests(client, 4, num_prompt=LONG, max_tokens=60)
        short = make_request("short", num_prompt=8, max_tokens=30)
        assert await collect(client, short) == expected_tokens(short)
        await check_all(started)
        assert num_sent(client, "r0") == 4
        assert num_sent(client, "r1") == 1
        assert num_moved(client.counts) == 4
        assert client.counts.num_resumed == 0
        blocks = [-(-(LONG + i) // 16) for i in range(4)]
        assert client.counts.num_moved_bytes >= sum(blocks) * 16 * 8


@pytest.mark.slow
@pytest.mark.parametrize("replica", ["r0", "r1"])
async def test_the_death_of_either_is_not_noticed(replica: str) -> None:
    async with moving_fleet(2, num_prefill=1) as client:
        started = start_requests(client, 6, num_prompt=LONG, max_tokens=120)
        await until(lambda: num_moved(client.counts) >= 2)
        send_signal(client, replica, signal.SIGKILL)
        more = start_requests(client, 2, "more", num_prompt=LONG, max_tokens=60)
        await check_all([*started, *more])
        assert client.counts.num_failed == 0
        await until(partial(_is_back, client, replica))
        await check_all(start_requests(client, 2, "later", num_prompt=LONG, max_tokens=60))


@pytest.mark.slow
async def test_streams_of_a_dead_replica_are_computed_like_prompts_and_move_again() -> None:
    async with moving_fleet(3, num_prefill=1) as client:
        started = start_requests(client, 6, num_prompt=LONG, max_tokens=200)
        await until(lambda: client.counts.moves["prefill", "moved"] == 6)
        there = next(view.num_outstanding for view in client.replicas() if view.replica == "r1")
        send_signal(client, "r1", signal.SIGKILL)
        await check_all(started, timeout=20)
        assert client.counts.num_resumed == there > 0
        assert client.counts.moves["prefill", "moved"] == 6 + there


@pytest.mark.slow
async def test_engines_that_plan_a_step_ahead_hand_over_as_well() -> None:
    async with moving_fleet(3, num_prefill=1, max_in_flight_steps=2) as client:
        started = start_requests(client, 8, num_prompt=LONG, max_tokens=120)
        await until(lambda: client.counts.moves["prefill", "moved"] >= 4)
        await client.drain("r1", seconds=60, restarts=True)
        await check_all(started)
        assert client.counts.moves["drain", "moved"] >= 1
        assert client.counts.num_resumed == 0


@pytest.mark.slow
async def test_streams_go_on_where_their_prompts_were_computed_until_there_is_room() -> None:
    async with moving_fleet(2, num_prefill=1, max_num_seqs=3) as client:
        started = start_requests(client, 6, num_prompt=LONG, max_tokens=150)
        await check_all(started)
        assert num_moved(client.counts) > 0
        assert client.counts.num_resumed == 0


@pytest.mark.parametrize("ahead", [1, 2], ids=["one-step", "overlapped"])
async def test_a_prompt_is_copied_while_it_is_computed(ahead: int) -> None:
    options: dict[str, Any] = {"pool_rule": "splitwise", **CHUNKS, "step_seconds": 0.05}
    async with moving_fleet(2, num_prefill=1, max_in_flight_steps=ahead, **options) as client:
        steps: list[tuple[MoveVerb, bool]] = []
        moves = client.controller._moves
        carry_out = moves.do

        def watched(step: MoveStep, request: OpenRequest | None) -> None:
            steps.append((step.verb, bool(client.streams.open[step.request_id].token_ids)))
            carry_out(step, request)

        moves.do = watched  # type: ignore[method-assign]
        await check_all(start_requests(client, 1, num_prompt=LONG, max_tokens=20))
        before = [verb for verb, has_tokens in steps if not has_tokens]
        assert before[:3] == [MoveVerb.HOLD, MoveVerb.RESERVE, MoveVerb.PULL]
        assert before.count(MoveVerb.PULL) >= 2
        assert client.counts.moves["prefill", "moved"] == 1
        check_owners(client._fleet)


@pytest.mark.slow
@pytest.mark.parametrize("replica", ["r0", "r2"])
async def test_a_death_while_prompts_are_copied_is_not_noticed(replica: str) -> None:
    options: dict[str, Any] = {"pool_rule": "splitwise", **CHUNKS}
    async with moving_fleet(4, num_prefill=2, **options) as client:
        started = start_requests(client, 12, num_prompt=LONG, max_tokens=100)
        await until(lambda: client.counts.num_moved_bytes > 0)
        send_signal(client, replica, signal.SIGKILL)
        await check_all(started)
        assert client.counts.num_failed == 0
        await until(partial(_is_back, client, replica))
        await check_all(start_requests(client, 4, "later", num_prompt=LONG, max_tokens=60))
        check_owners(client._fleet)


@pytest.mark.slow
async def test_what_one_pool_has_no_room_for_goes_to_the_other() -> None:
    options: dict[str, Any] = {"pool_rule": "splitwise", **CHUNKS, "max_num_seqs": 3}
    async with moving_fleet(3, num_prefill=2, **options) as client:
        started = start_requests(client, 8, num_prompt=LONG, max_tokens=150)
        await check_all(started)
        assert num_moved(client.counts) > 0
        assert client.counts.num_resumed == 0
        check_owners(client._fleet)


def _is_back(client: FleetClient, replica: str) -> bool:
    return lives_of(client, replica) == 2 and is_ready(client, replica)
