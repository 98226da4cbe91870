"""Micro-batches in pipeline stages."""

from __future__ import annotations

import pytest

from onbeat.simulator.simulate import simulate
from tests.pure.simulator.loads import ShapeTime, StepByStep, linear_time, make_config, make_load, random_load


def test_stages_by_hand():
    """Three prompts of one step each in two stages; a step takes 2 s, so 1 s a stage."""
    config = make_config(scheduler={"max_num_seqs": 2}, pipeline=2)
    load = make_load([8, 8, 8], [1, 1, 1], [0.0, 0.0, 0.0])
    result = simulate(load, config, ShapeTime(lambda shape: 2.0))
    assert [record.scheduled for record in result.records] == [0.0, 1.0, 2.0]
    assert [record.end for record in result.records] == [2.0, 3.0, 4.0]
    [counters] = result.replicas
    assert counters.busy_seconds == 4.0
    assert counters.bubble_seconds == 2.0  # the second stage waits at first, the first stage at last


def test_a_long_micro_batch_holds_up_the_one_behind_it():
    """1 s, then 3 s, then 1 s in each of two stages: the last waits 2 s for the second stage."""
    config = make_config(scheduler={"max_num_seqs": 2, "max_num_batched_tokens": 64}, pipeline=2)
    load = make_load([8, 60, 9], [1, 1, 1], [0.0, 0.0, 0.0])
    result = simulate(load, config, ShapeTime(lambda shape: 6.0 if shape.num_new_tokens == 60 else 2.0))
    assert [record.end for record in result.records] == [2.0, 7.0, 8.0]
    [counters] = result.replicas
    assert counters.bubble_seconds == 2 * 8.0 - 10.0


def test_unequal_micro_batches_cost_more_bubbles():
    """Chunks even out the micro-batches, whole prompts do not (Sarathi-Serve, OSDI 2024, section 3.3)."""
    load = random_load(200, rate=1e4, seed=3, prompt=200, output=50)
    shares = {}
    for policy in ("sarathi", "orca"):
        config = make_config(policy, scheduler={"num_blocks": 256, "max_num_seqs": 16}, pipeline=4)
        [counters] = simulate(load, config, linear_time()).replicas
        shares[policy] = counters.bubble_seconds / (4 * counters.busy_seconds)
    assert 0 < shares["sarathi"] < 0.7 * shares["orca"]


def test_at_most_one_micro_batch_a_stage_is_under_way():
    observer = StepByStep()
    load = random_load(60, rate=100, seed=1)
    result = simulate(load, make_config(pipeline=3), linear_time(), observer=observer)
    changes = [(stats.start, 1) for _, stats in observer.steps] + [
        (stats.end, -1) for _, stats in observer.steps
    ]
    num_under_way = most = 0
    for _, change in sorted(changes):  # an end comes before a start at the same time
        num_under_way += change
        most = max(most, num_under_way)
    assert most == 3
    assert result.total.num_steps == len(observer.steps)


def test_host_overhead_holds_up_the_first_stage():
    config = make_config(scheduler={"max_num_seqs": 2}, pipeline=2, host_overhead=0.5)
    load = make_load([8, 8], [1, 1], [0.0, 0.0])
    records = simulate(load, config, ShapeTime(lambda shape: 2.0)).records
    assert [record.end for record in records] == [2.5, 4.0]


def test_a_deeper_pipeline_generates_more_but_starts_no_sooner():
    load = random_load(100, rate=1e4, seed=5)
    model = ShapeTime(lambda shape: 1e-2 + 1e-4 * shape.num_new_tokens)
    flat, deep = (
        simulate(load, make_config(scheduler={"max_num_seqs": 16}, pipeline=stages), model)
        for stages in (1, 2)
    )
    assert deep.duration == pytest.approx(flat.duration, rel=0.5)
    assert deep.records[0].ttft >= flat.records[0].ttft
