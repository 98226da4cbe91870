"""What one replica refuses, another takes: live, and in a simulation of the same."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from onbeat.cluster.client import FleetClient
from onbeat.core.errors import Overloaded
from onbeat.simulator.simulate import simulate
from tests.fleet.fleets import collect, fleet_of, make_request
from tests.pure.simulator.loads import ShapeTime, make_config, make_load
from tests.waiting import until

LIMITS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_num_queued_reqs": 1,
    "max_model_len": 1024,
    "num_blocks": 256,
}
STEP, APART = 0.01, 0.1
LONG, SHORT = 900, 2
OUTPUTS = [LONG, SHORT] * 3 + [LONG] * 5
"""Those of the first replica go on; the second has ended its own when the others come."""
OUTSTANDING = [[1, 0], [1, 0], [2, 0], [2, 0], [3, 0], [3, 0], [3, 1], [3, 2], [3, 3]]
"""Requests of each replica after each of the first, two of which run."""


def has(client: FleetClient, expected: list[int]) -> bool:
    views = client.replicas()
    streaming = [min(number, LIMITS["max_num_seqs"]) for number in expected]
    return [view.num_outstanding for view in views] == expected and [
        view.num_streaming for view in views
    ] == streaming


async def refused_live() -> set[int]:
    async with fleet_of(2, router="round-robin", step_seconds=STEP, **LIMITS) as client:
        refused: set[int] = set()

        async def ask(index: int) -> None:
            try:
                await collect(client, make_request(str(index), max_tokens=OUTPUTS[index]))
            except Overloaded:
                refused.add(index)

        tasks = []
        for index, expected in enumerate(OUTSTANDING):
            tasks.append(asyncio.create_task(ask(index)))
            if OUTPUTS[index] == SHORT:
                await tasks[-1]
            await until(partial(has, client, expected))
        tasks += [asyncio.create_task(ask(index)) for index in range(len(OUTSTANDING), len(OUTPUTS))]
        await until(lambda: len(refused) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return refused


async def test_a_simulated_fleet_refuses_what_a_live_one_does() -> None:
    load = make_load([5] * len(OUTPUTS), OUTPUTS, [APART * index for index in range(len(OUTPUTS))])
    config = make_config(
        scheduler={**LIMITS, "max_num_batched_tokens": 512}, router="round-robin", replicas=2
    )
    records = simulate(load, config, ShapeTime(lambda shape: STEP)).records
    simulated = {int(record.request_id) for record in records if record.is_rejected}
    assert simulated == {9, 10}
    assert await refused_live() == simulated
