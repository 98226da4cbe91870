"""Engines that plan a step while the one before it runs."""

from __future__ import annotations

import pytest

from onbeat.core.errors import ConfigError
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from onbeat.simulator.simulation_config import SimulationConfig
from tests.pure.simulator.loads import ShapeTime, StepByStep, linear_time, make_config, make_load, random_load

SECOND = ShapeTime(lambda shape: 1.0)


def first_tokens(config: SimulationConfig, prompts: list[int], outputs: list[int], arrivals: list[float]):
    records = simulate(make_load(prompts, outputs, arrivals), config, SECOND).records
    return [record.delivery_times[0] for record in sorted(records, key=lambda each: int(each.request_id))]


def test_a_request_joins_the_step_after_the_one_that_is_planned():
    """It comes in the third step: the fourth is planned, so that it is in the fifth."""
    assert first_tokens(make_config(), [8, 8], [9, 2], [0.0, 2.5]) == [1.0, 4.0]
    assert first_tokens(make_config(steps_ahead=1), [8, 8], [9, 2], [0.0, 2.5]) == [1.0, 5.0]


@pytest.mark.parametrize("policy", ["sarathi", "slo"])
def test_one_that_comes_as_a_step_ends_has_missed_the_plan_of_that_instant(policy: str):
    assert first_tokens(make_config(policy), [8, 8], [9, 2], [0.0, 3.0]) == [1.0, 4.0]
    assert first_tokens(make_config(policy, steps_ahead=1), [8, 8], [9, 2], [0.0, 3.0]) == [1.0, 6.0]


def test_an_idle_engine_begins_at_once():
    assert first_tokens(make_config(steps_ahead=1), [8, 8], [2, 2], [0.0, 5.5]) == [1.0, 6.5]


def test_an_engine_that_runs_empty_waits_for_no_step():
    assert first_tokens(make_config(steps_ahead=1), [8, 8], [2, 2], [0.0, 1.5]) == [1.0, 3.0]


def test_a_closed_loop_waits_two_steps_longer():
    load = make_load([8] * 40, [20 + index % 7 for index in range(40)])
    ttft = []
    for steps_ahead in (0, 1):
        config = make_config(max_concurrency=4, steps_ahead=steps_ahead)
        records = simulate(load, config, SECOND).records
        later = [record.delivery_times[0] - record.arrival for record in records if record.arrival > 0]
        ttft.append(sorted(later)[len(later) // 2])
    assert ttft == [1.0, 3.0]


@pytest.mark.parametrize("policy", ["sarathi", "slo", "prefill-first"])
def test_runs_of_steps_and_single_steps_agree(policy: str):
    load = random_load(60, rate=12, seed=9)
    config = make_config(policy, steps_ahead=1)
    at_once = simulate(load, config, linear_time())
    one_by_one = simulate(load, config, linear_time(), observer=StepByStep())
    assert [list(record.delivery_times) for record in at_once.records] == [
        list(record.delivery_times) for record in one_by_one.records
    ]
    assert sum(replica.num_leaked_blocks for replica in at_once.replicas) == 0
    assert sum(len(record.delivery_times) for record in at_once.records) == int(load.num_output_tokens.sum())


def test_a_request_refused_when_it_is_seen_is_closed():
    """Two wait in a queue for one, both held: the second is refused once the first has been taken."""
    config = make_config(scheduler={"max_num_queued_reqs": 1, "max_num_seqs": 1}, steps_ahead=1)
    records = simulate(make_load([8, 8, 8], [9, 2, 2], [0.0, 2.3, 2.4]), config, SECOND).records
    assert [record.is_rejected for record in sorted(records, key=lambda each: int(each.request_id))] == [
        False,
        False,
        True,
    ]


def test_the_engine_says_how_far_ahead_it_plans():
    settings = Deployment(model="Llama-3.1-8B", device="h100-sxm", engine="vllm")
    assert resolve(settings).config.steps_ahead == 1
    plain = Deployment(model="Llama-3.1-8B", device="h100-sxm")
    assert resolve(plain).config.steps_ahead == 0
    stages = Deployment(model="Llama-3.1-8B", device="h100-sxm", engine="vllm", pipeline_parallel=2)
    assert resolve(stages).config.steps_ahead == 0


def test_more_steps_ahead_are_refused():
    with pytest.raises(ConfigError, match="steps_ahead is 2"):
        make_config(steps_ahead=2)
