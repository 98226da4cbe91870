"""Streams of simulated fleets that move with their KV: at drains, and where a replica is in trouble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from onbeat.core.handover import MoveVerb
from onbeat.scheduler.cluster.events import Answered, FleetAction, MoveStep
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import FleetChange, FleetTimes, KVLink, ReplicaKind, SimulationConfig
from onbeat.simulator.virtual_moves import Links
from tests.pure.simulator.loads import (
    ShapeTime,
    StepByStep,
    fleet_config,
    linear_time,
    make_load,
    random_load,
)

STEP = 0.02


def fleet_of(num_replicas: int = 2, *, bandwidth: float = 1e6, **changes: Any) -> SimulationConfig:
    """Return a fleet whose KV takes a byte a token."""
    limits: dict[str, Any] = {
        "num_blocks": 1024,
        "max_model_len": 16_384,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 16_384,
        "policy": "sarathi",
    }
    limits |= changes.pop("limits", {})
    return fleet_config(
        SchedulerConfig(**limits),
        replicas=num_replicas,
        kv_link=KVLink(bytes_per_token=1, bandwidth=bandwidth),
        **({"router": "least-outstanding"} | changes),
    )


def gap_of_the_move(load, config: SimulationConfig) -> tuple[float, list[tuple[float, MoveStep]]]:
    """Return the longest gap of the only request that moves, and the steps of its move."""
    steps: list[tuple[float, MoveStep]] = []

    def watch(_event: object, now: float, actions: Sequence[FleetAction]) -> None:
        steps.extend((now, each) for each in actions if isinstance(each, MoveStep))

    result = simulate(load, config, ShapeTime(lambda shape: STEP), on_decision=watch)
    (record,) = [each for each in result.records if "+" in (each.replica or "")]
    assert record.is_completed
    return max(b - a for a, b in pairwise(record.delivery_times)), steps


@pytest.mark.parametrize("num_prompt_tokens", [1_000, 4_000, 8_000])
def test_the_time_that_a_stream_stands_still_does_not_grow_with_its_length(num_prompt_tokens):
    """A copy of 1,000 tokens takes 50 steps, but all of it but the last blocks goes while the stream runs."""
    config = fleet_of(
        bandwidth=1_000.0,
        fleet_changes=(FleetChange(1.0, "drain", 0),),
        fleet_times=FleetTimes(drain_seconds=60.0),
    )
    load = make_load([num_prompt_tokens, 100], [1500, 1500], [0.0, 0.0])
    gap, steps = gap_of_the_move(load, config)
    pulls = [step for _, step in steps if step.verb is MoveVerb.PULL]
    assert len(pulls) <= 4  # three rounds while it runs at most, and the rest
    num_last = [step.num_blocks for step in pulls][-1]
    assert num_last * 16 > num_prompt_tokens  # what is left is what it wrote meanwhile
    assert gap < 8 * STEP


def test_a_move_copies_what_windows_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five layers in six have a window of 32 tokens: of these go the last blocks alone."""
    sizes: list[float] = []
    begin = Links.begin

    def noted(links: Links[str], move: str, source: int, destination: int, size: float, now: float) -> None:
        sizes.append(size)
        begin(links, move, source, destination, size, now)

    monkeypatch.setattr(Links, "begin", noted)

    def moved(**windows: int) -> float:
        config = fleet_of(
            limits={"max_num_batched_tokens": 512, **windows},
            fleet_changes=(FleetChange(1.0, "drain", 0),),
            fleet_times=FleetTimes(drain_seconds=60.0),
        )
        load = make_load([8_000, 100], [1500, 1500], [0.0, 0.0])
        assert simulate(load, config, ShapeTime(lambda shape: STEP)).num_completed == 2
        num_bytes = sum(sizes)
        sizes.clear()
        return num_bytes

    whole, kept = moved(), moved(num_tables=6, window_length=32)
    assert 8_000 < whole < 9_000
    assert whole / 6 <= kept < whole / 6 + 5 * 64


def test_a_copy_slows_its_source_down_at_once_whether_steps_are_taken_together_or_not():
    """Answers are heard of late, so that the source is in a run of steps when the copy begins."""
    config = fleet_of(
        fleet_changes=(FleetChange(1.0, "drain", 0),),
        fleet_times=FleetTimes(drain_seconds=60.0, report_seconds=0.1),
    )
    step_time = ShapeTime(lambda shape: STEP)
    kind = ReplicaKind(scheduler=config.scheduler, step_time=step_time, memory_bandwidth=1e5)
    config = replace(config, kinds=(kind, kind))
    load = make_load([1000, 100], [400, 400], [0.0, 0.0])
    together = simulate(load, config, step_time)
    assert together.records == simulate(load, config, step_time, observer=StepByStep()).records
    assert together.decisions["moved: drain"] == 1


def test_a_drain_without_time_leaves_no_room_kept_elsewhere():
    """The move begins and is given up at one instant, in which the source stops."""
    config = fleet_of(
        fleet_changes=(FleetChange(1.0, "drain", 0),), fleet_times=FleetTimes(drain_seconds=0.0)
    )
    result = simulate(make_load([100] * 2, [400] * 2, [0.0, 0.0]), config, ShapeTime(lambda shape: STEP))
    assert result.num_completed == 2
    assert [each.num_leaked_blocks for each in result.replicas] == [0, 0]


def test_a_drain_moves_what_runs_and_ends_at_once():
    config = fleet_of(
        fleet_changes=(FleetChange(2.0, "drain", 0),), fleet_times=FleetTimes(drain_seconds=60.0)
    )
    load = make_load([100] * 12, [400] * 12, [0.05 * number for number in range(12)])
    stops: list[float] = []

    def watch(_event: object, now: float, actions: Sequence[FleetAction]) -> None:
        stops.extend(now for each in actions if type(each).__name__ == "Stop")

    result = simulate(load, config, ShapeTime(lambda shape: STEP), on_decision=watch)
    assert result.num_completed == 12
    assert result.decisions["moved: drain"] == 6
    assert len(stops) == 1
    assert 2.0 < stops[0] < 3.0  # they would have taken until 8
    assert all(each.num_leaked_blocks == 0 for each in result.replicas)


def test_without_a_link_streams_end_where_they_are():
    config = fleet_of(
        fleet_changes=(FleetChange(2.0, "drain", 0),), fleet_times=FleetTimes(drain_seconds=60.0)
    )
    config = replace(config, kv_link=None)
    load = make_load([100] * 6, [400] * 6, [0.05 * number for number in range(6)])
    result = simulate(load, config, ShapeTime(lambda shape: STEP))
    assert not any(name.startswith("moved:") for name in result.decisions)
    assert {each.replica for each in result.records} == {"0", "1"}


def test_a_replica_short_of_memory_gives_streams_away_before_it_preempts_them():
    """One of two replicas got all long streams; the other has room for those that do not fit."""
    load = make_load([100] * 10, np.tile([900, 10], 5), [0.01 * number for number in range(10)])
    config = fleet_of(limits={"num_blocks": 256, "max_model_len": 1024}, router="round-robin")
    before = simulate(load, replace(config, kv_link=None), linear_time())
    after = simulate(load, config, linear_time())
    assert after.decisions["moved: memory"] + after.decisions.get("moved: queue", 0) > 0
    assert after.total.num_preemptions < before.total.num_preemptions


def test_one_replica_owns_each_request_and_each_copy_moves_what_it_was_asked_for():
    """Streams that move to and fro between short memories: bytes are whole blocks, and nothing is left."""
    config = fleet_of(
        3,
        bandwidth=2_000.0,
        limits={"num_blocks": 48, "max_model_len": 256, "max_num_seqs": 8},
        fleet_changes=(FleetChange(3.0, "restart", 0), FleetChange(9.0, "restart", 1)),
        fleet_times=FleetTimes(start_seconds=2.0),
    )
    copied: dict[str, int] = {}

    def watch(event: object, _now: float, actions: Sequence[FleetAction]) -> None:
        if isinstance(event, Answered) and event.verb is MoveVerb.PULL and event.ok:
            copied[event.move] = copied.get(event.move, 0) + 1
        for each in actions:
            if isinstance(each, MoveStep) and each.verb is MoveVerb.ADOPT:
                assert copied.pop(each.move)

    load = random_load(200, rate=15.0, seed=4, prompt=120, output=100)
    result = simulate(load, config, ShapeTime(lambda shape: 0.05), on_decision=watch)
    assert [each.num_output_tokens for each in result.records] == load.num_output_tokens.tolist()
    assert all(len(each.delivery_times) == each.num_output_tokens for each in result.records)
    assert sum(count for name, count in result.decisions.items() if name.startswith("moved:")) > 5
    assert all(each.num_leaked_blocks == 0 for each in result.replicas)


def test_whole_batches_run_beside_a_link_though_some_of_their_rows_have_ended() -> None:
    """They hold what has ended until all have, and nobody can leave one."""
    load = random_load(40, rate=20.0, seed=1)
    result = simulate(load, fleet_of(limits={"policy": "static"}), linear_time())
    assert result.num_completed == 40
