"""A simulated replica holds as many requests of a model with windows as an engine's scheduler does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onbeat.core.options import change
from onbeat.metrics.record import RequestRecord
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.simulator.deployment import Deployment
from onbeat.simulator.resolve import resolve
from onbeat.simulator.simulate import simulate
from tests.pure.scheduler.driver import Driver, make_request
from tests.pure.simulator.loads import linear_time, make_load

NUM_PROMPT, NUM_OUTPUT, NUM_REQUESTS = 6000, 300, 16


def scheduled(config: SchedulerConfig) -> int:
    """Return how many long requests decode at once under a scheduler with its KV manager."""
    driver, most = Driver(config), 0
    for index in range(NUM_REQUESTS):
        driver.add(make_request(f"r{index}", NUM_PROMPT, NUM_OUTPUT))
    for _ in range(3000):
        if not driver.step():
            break
        most = max(most, sum(state.num_output_tokens > 0 for state in driver.scheduler.running))
    assert driver.scheduler.num_unfinished == 0
    return most


def overlapping(records: list[RequestRecord]) -> int:
    """Return how many requests had a first token and no last one, at most."""
    begun = [record.delivery_times[0] for record in records]
    return max(
        sum(first <= at < record.end for first, record in zip(begun, records, strict=True) if record.end)
        for at in begun
    )


@pytest.mark.parametrize("name", ["gemma-3-4b-pt", "gpt-oss-20b", "Mistral-7B-v0.1"])
def test_a_simulated_replica_admits_as_many_long_requests_as_a_scheduler(name: str) -> None:
    settings = Deployment(model=name, device="h100-sxm", num_blocks=1200)
    settings = change(
        settings, policy="sarathi", max_num_batched_tokens=512, max_num_seqs=32, max_model_len=8192
    )
    config = resolve(settings).config
    limits = replace(config.scheduler, enable_prefix_caching=False)
    load = make_load([NUM_PROMPT] * NUM_REQUESTS, [NUM_OUTPUT] * NUM_REQUESTS, [0.0] * NUM_REQUESTS)
    found = overlapping(simulate(load, replace(config, scheduler=limits), linear_time()).records)
    assert found == scheduled(limits)
    whole = replace(limits, num_tables=1, window_length=0)
    assert scheduled(whole) == whole.num_requests(NUM_PROMPT + NUM_OUTPUT) == 3
    # it counts a step's tokens in each window, which only prompts need
    assert found >= limits.num_requests(NUM_PROMPT + NUM_OUTPUT)
    assert found > 3


def test_a_moves_bytes_are_those_of_whole_blocks() -> None:
    """Ten tables of gemma-4-26B-A4B, each as large as three layers with a window."""
    settings = Deployment(model="gemma-4-26B-A4B", device="h100-sxm", kv_bandwidth=25e9)
    config = resolve(settings).config
    assert config.scheduler.num_tables == 10
    assert config.kv_link is not None
    assert config.kv_link.bytes_per_token == pytest.approx(10 * 3 * (2 * 8 * 256) * 2)
