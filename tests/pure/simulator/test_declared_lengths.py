"""Requests that declare a longer output than they generate: reserved for, but ended at their own length."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.cli import capacity as capacity_command
from onbeat.cli import simulate as simulate_command
from onbeat.cli.args import Parser
from onbeat.cli.options import read_options
from onbeat.core.errors import ConfigError
from onbeat.core.fleet import PoolSizes
from onbeat.core.options import make
from onbeat.scheduler.replica.policies import POLICIES
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from tests.examples import examples
from tests.pure.simulator.loads import (
    StepByStep,
    count_plans,
    linear_time,
    make_config,
    make_load,
    random_load,
)

pytestmark = pytest.mark.usefixtures("comparators")


def at_once_and_one_by_one(load, config):
    observer = StepByStep()
    one_by_one = simulate(load, config, linear_time(), observer=observer)
    at_once = simulate(load, config, linear_time())
    assert at_once.total.num_steps == len(observer.steps)
    return at_once, one_by_one


@given(
    policy=st.sampled_from(sorted(POLICIES)),
    declared=st.integers(1, 150),
    num_blocks=st.integers(16, 40),
    num_replicas=st.integers(1, 2),
    router=st.sampled_from(["round-robin", "least-outstanding"]),
    rate=st.sampled_from([1.0, 20.0]),
    seed=st.integers(0, 1000),
)
@examples(30)
def test_runs_of_steps_equal_single_steps(policy, declared, num_blocks, num_replicas, router, rate, seed):
    load = random_load(24, rate=rate, seed=seed, prompt=150, output=90)
    config = make_config(
        policy,
        scheduler={"num_blocks": num_blocks},
        replicas=num_replicas,
        router=router,
        declared_max_tokens=declared,
    )
    at_once, one_by_one = at_once_and_one_by_one(load, config)
    assert at_once.records == one_by_one.records
    assert at_once.replicas == one_by_one.replicas
    for record in at_once.records:
        assert record.num_output_tokens == record.offered_output_tokens
        ends_early = record.offered_output_tokens < declared
        assert record.finish_reason == ("stop" if ends_early else "length")


def test_without_a_reservation_a_declared_length_changes_nothing_but_the_reason():
    load = random_load(40, rate=20, seed=3, prompt=150, output=90)
    plain = simulate(load, make_config(), linear_time()).records
    declared = simulate(load, make_config(declared_max_tokens=100), linear_time()).records
    assert {record.finish_reason for record in declared} == {"stop"}
    assert [replace(record, finish_reason="length") for record in declared] == plain


def test_runs_of_steps_are_still_taken_at_once(monkeypatch):
    load = random_load(50, rate=1, seed=1, prompt=30, output=60)
    plans = count_plans(monkeypatch)
    result = simulate(load, make_config(declared_max_tokens=200), linear_time())
    assert len(plans) < result.total.num_steps / 3


@pytest.mark.parametrize(
    ("policy", "declared", "expected"),
    [
        ("orca", None, 4),
        ("orca", 112, 2),  # 16 + 112 tokens are 8 blocks of 16
        ("orca", 240, 1),
        ("orca", 4000, 1),  # no more than the context is set aside
        ("static", 112, 2),
        ("hybrid-only", 240, 4),
        ("sarathi", 240, 4),
    ],
)
def test_reservation_is_of_the_declared_length(policy, declared, expected):
    """Of four requests with 16 + 4 tokens, as many run at once as 16 blocks are set aside for."""
    load = make_load([16] * 4, [4] * 4, [0.0] * 4)
    config = make_config(
        policy,
        scheduler={"num_blocks": 16, "max_num_batched_tokens": 256},
        declared_max_tokens=declared,
    )
    records = simulate(load, config, linear_time()).records
    assert sum(record.scheduled == 0.0 for record in records) == expected
    assert all(record.num_output_tokens == 4 for record in records)


def test_in_a_pipeline():
    load = random_load(20, rate=20, seed=5, prompt=60, output=40)
    config = make_config(pipeline=2, declared_max_tokens=100)
    plain = simulate(load, make_config(pipeline=2), linear_time()).records
    declared = simulate(load, config, linear_time()).records
    assert [list(record.delivery_times) for record in declared] == [
        list(record.delivery_times) for record in plain
    ]


def settings_with(**changes) -> Deployment:
    return make(Deployment, model="meta-llama/Llama-3.1-8B", device="h100-sxm", **changes)


def test_two_pools_hand_over_requests_that_stop_early():
    load = make_load([100] * 3, [1, 2, 30], [0.0, 0.5, 1.0])
    records = []
    for declared in (None, 500):
        simulation = resolve(
            settings_with(
                max_model_len=1024,
                declared_max_tokens=declared,
                policy="sarathi",
                disaggregate=PoolSizes(prefill=1, decode=1),
                pool_rule="distserve",
                kv_bandwidth=1e11,
            )
        )
        records.append(simulate(load, simulation.config, simulation.step_time).records)
    plain, declared = records
    assert [record.replica for record in declared] == ["0", "0+1", "0+1"]
    assert [list(record.delivery_times) for record in declared] == [
        list(record.delivery_times) for record in plain
    ]


@pytest.mark.parametrize("command", [simulate_command, capacity_command])
def test_command_line_reaches_the_simulation(command):
    parser = Parser(prog="onbeat")
    command.add_arguments(parser)
    args = parser.parse_args(
        ["--model", "meta-llama/Llama-3.1-8B", "--device", "h100-sxm", "--declared-max-tokens", "2048"]
    )
    assert resolve(read_options(args, Deployment)).config.declared_max_tokens == 2048


def test_it_must_be_a_number_of_tokens():
    with pytest.raises(ConfigError, match="declared_max_tokens is 0"):
        make_config(declared_max_tokens=0)
