"""Windows that give KV back: more requests at once, and prefix hits that need the last window alone."""

from __future__ import annotations

from typing import Any

import pytest

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import ReplicaLimits
from onbeat.scheduler.replica.token_budget import settle
from onbeat.scheduler.scheduler_config import SchedulerLimits
from tests.pure.scheduler.driver import Driver, make_config, make_request

WINDOWED: dict[str, Any] = {"num_tables": 6, "window_length": 32}
"""As in Gemma 3, of which five layers in six have a window."""


def most_running(**changes: Any) -> int:
    """Return how many requests of 200 tokens decode at once, before one has to be preempted."""
    driver = Driver(make_config(num_blocks=40, enable_prefix_caching=False, max_num_seqs=16, **changes))
    for index in range(16):
        driver.add(make_request(f"r{index}", 150, 51))
    most = 0
    for _ in range(2000):
        if not driver.step():
            break
        most = max(most, len(driver.scheduler.running))
    driver.scheduler.check_invariants()
    assert driver.scheduler.kv.pool.num_used_blocks == 0
    return most


def start_of(driver: Driver, request_id: str) -> int:
    rows = (row for step in driver.log for row in step.rows)
    return next(row.num_computed_tokens for row in rows if row.request_id == request_id)


def test_the_same_memory_holds_twice_the_requests() -> None:
    """A prompt of ten blocks takes 60 parts, or 40 with windows; with the answer 78, or 33."""
    assert (most_running(), most_running(**WINDOWED)) == (4, 8)


@pytest.mark.parametrize("others", [0, 12])
def test_a_hit_needs_the_last_window_alone(others: int) -> None:
    """It is there as long as nobody took its room."""
    driver = Driver(make_config(num_blocks=30, max_num_batched_tokens=64, **WINDOWED))
    shared = list(range(160))
    driver.add(make_request("first", 0, 3, prompt=[*shared, 1, 2, 3], salt="all"))
    driver.run()
    for index in range(others):
        driver.add(make_request(f"other{index}", 200, 40))
        driver.run()
    driver.add(make_request("second", 0, 3, prompt=[*shared, 7, 8, 9], salt="all"))
    driver.run()
    starts = [
        row.num_computed_tokens for step in driver.log for row in step.rows if row.request_id == "second"
    ]
    assert starts[0] == (0 if others else 160)
    driver.scheduler.check_invariants()


def test_nobody_goes_on_from_windows_of_a_request_that_failed() -> None:
    driver = Driver(make_config(num_blocks=30, max_num_batched_tokens=64, **WINDOWED))
    prompt = list(range(160))
    driver.breaking.add("first")
    driver.add(make_request("first", 0, 3, prompt=prompt, salt="all"))
    driver.run()
    driver.add(make_request("second", 0, 3, prompt=prompt, salt="all"))
    driver.run()
    second = [
        row.num_computed_tokens for step in driver.log for row in step.rows if row.request_id == "second"
    ]
    assert second[0] == 0
    assert driver.scheduler.kv.pool.num_used_blocks == 0


def test_a_router_knows_how_many_more_long_requests_fit() -> None:
    """Limits and reports count the blocks of all tables: a long request holds few of these."""
    config = make_config(num_blocks=40, enable_prefix_caching=False, max_num_seqs=16, **WINDOWED)
    limits = ReplicaLimits(
        max_model_len=256, max_num_seqs=16, num_blocks=config.num_pages, block_size=16, windows=config.windows
    )
    # ten blocks of the first table, and six of each of five others
    assert limits.num_blocks_for(160) == 10 + 5 * 6 == config.windows.num_blocks(10)
    assert limits.num_streams(160) == 240 / 40
    driver = Driver(config)
    num_fit = []
    for index in range(8):
        load = driver.scheduler.load(float(index))
        assert load.num_free_blocks == driver.scheduler.kv.pool.num_free_blocks
        num_fit.append(load.num_free_blocks // limits.num_blocks_for(160))
        driver.add(make_request(f"r{index}", 150, 10))
        driver.step()
    assert num_fit[0] == 6
    assert num_fit == sorted(num_fit, reverse=True)
    queued = driver.scheduler.load(8.0)
    assert queued.num_waiting == 6
    assert queued.num_queued_blocks == -(-6 * 150 // 16) + 5 * 6 * queued.num_waiting
    assert queued.num_wanted_blocks == max(0, limits.num_blocks_for(150) - queued.num_free_blocks)


GEMMA_4: dict[str, Any] = {"num_tables": 10, "window_length": 1024}
"""As in gemma-4-26B-A4B."""


@pytest.mark.parametrize(
    ("num_blocks", "asked", "step", "longest"),
    [
        (511, None, 512, 67_648),  # an eighth would be less than a step is worth
        (1340, None, 1920, 187_616),
        (1340, 190_000, 1648, 190_000),  # what is asked for leaves windows less
        (20_000, None, 8192, 262_144),
    ],
)
def test_steps_are_no_larger_than_goes_with_the_windows(
    num_blocks: int, asked: int | None, step: int, longest: int
) -> None:
    """A window holds the tokens of a step beside its own: with 8,192 a request had 8,176 in 511 blocks."""
    limits = SchedulerLimits(max_num_seqs=32, max_model_len=asked)
    found = settle(limits, num_blocks=num_blocks, model_len=262_144, **GEMMA_4)
    assert (found.max_num_batched_tokens, found.max_model_len) == (step, longest)
    assert settle(limits, num_blocks=20_000, model_len=262_144).max_num_batched_tokens == 8192


def test_a_step_that_is_asked_for_stays() -> None:
    limits = SchedulerLimits(max_num_seqs=32, max_num_batched_tokens=8192)
    assert settle(limits, num_blocks=511, model_len=262_144, **GEMMA_4).max_model_len == 8176
    few = SchedulerLimits(max_num_seqs=600)
    assert settle(few, num_blocks=511, model_len=262_144, **GEMMA_4).max_num_batched_tokens == 600
    with pytest.raises(ConfigError, match=r"holds 67648 .* make it 514 blocks"):
        settle(SchedulerLimits(max_model_len=68_000), num_blocks=511, model_len=262_144, **GEMMA_4)
