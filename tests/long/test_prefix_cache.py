"""Shared prefixes of a load become hits in the scheduler's prefix cache."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.simulator.simulate import simulate
from onbeat.workload.offered import OfferedLoad
from onbeat.workload.trace import read_trace
from tests.pure.simulator.loads import linear_time, make_config, make_load


def cached_tokens(load: OfferedLoad, **limits) -> list[int]:
    config = make_config(scheduler={"max_num_batched_tokens": 256, **limits}, max_concurrency=1)
    return [record.num_cached_tokens for record in simulate(load, config, linear_time()).records]


@pytest.mark.parametrize(
    ("block_size", "expected"),
    [
        (16, [0, 80, 96]),  # a load's block has two parts; of the last one a token is left to compute
        (32, [0, 64, 96]),
        (64, [0, 64, 64]),  # two of the load's blocks at a time
    ],
)
def test_blocks_of_other_sizes(block_size, expected):
    load = make_load(
        [96, 96, 112],
        [4, 4, 4],
        block_ids=((7, 8, 9), (7, 8, 9), (7, 8, 9, 10)),
        block_size=32,
    )
    assert cached_tokens(load, block_size=block_size) == expected


def test_only_full_blocks_of_the_prompt_are_shared():
    """The last block's id covers 8 tokens of the prompt; the output behind it is another's."""
    load = make_load([40, 60], [30, 4], block_ids=((1, 2), (1, 2)), block_size=32)
    assert cached_tokens(load) == [0, 32]


@pytest.mark.parametrize(("ids_cover_output", "expected"), [(False, [0, 32]), (True, [0, 64])])
def test_a_later_turn_holds_the_answer_before_it(ids_cover_output, expected):
    load = make_load(
        [40, 80],
        [30, 4],
        block_ids=((1, 2, 3, 4), (1, 2, 3, 4, 5)),
        block_size=16,
        ids_cover_output=ids_cover_output,
    )
    assert cached_tokens(load) == expected


def test_loads_without_ids_share_nothing():
    assert cached_tokens(make_load([64, 64], [4, 4])) == [0, 0]


def test_blocks_that_do_not_fit_together_are_refused():
    load = make_load([64], [4], block_ids=((1, 2),), block_size=48)
    with pytest.raises(ConfigError, match=r"48 .* 32"):
        cached_tokens(load, block_size=32)


@pytest.mark.skipif(
    "ONBEAT_SHARED" not in os.environ, reason="ONBEAT_SHARED names the folder of recorded traces"
)
@pytest.mark.parametrize(("name", "expected"), [("conversation", 0.366), ("synthetic", 0.640)])
def test_hit_ratio_of_mooncakes_traces_with_an_unlimited_cache(name, expected):
    """Blocks of the trace, of which part or all was found; the last of a prompt is only partly filled."""
    path = Path(os.environ["ONBEAT_SHARED"]) / f"data/traces/mooncake_fast25_{name}_trace.csv.gz"
    trace = read_trace(path)
    load = make_load(
        trace.num_prompt_tokens,
        np.ones(len(trace)),
        block_ids=trace.block_ids,
        block_size=trace.block_size,
    )
    longest = int(trace.num_prompt_tokens.max()) + 1
    cached = cached_tokens(
        load,
        block_size=256,
        num_blocks=int(trace.num_prompt_tokens.sum()) // 256,
        max_model_len=longest,
        max_num_batched_tokens=longest,
    )
    num_hits = sum(-(-tokens // 512) for tokens in cached)
    assert num_hits / sum(map(len, trace.block_ids)) == pytest.approx(expected, abs=0.002)
