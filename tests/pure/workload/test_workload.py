from __future__ import annotations

import numpy as np
import pytest

from onbeat.core.errors import ConfigError
from onbeat.workload.lengths import UniformLength
from onbeat.workload.prompts import PromptWriter, estimated_pool
from onbeat.workload.trace import Trace
from onbeat.workload.workload import shared_prefix_workload, synthetic_workload, trace_workload

WRITER = PromptWriter(estimated_pool(), "salt")


def trace(**columns: object) -> Trace:
    defaults: dict[str, object] = {
        "kind": "mooncake",
        "num_prompt_tokens": np.array([9, 12, 0]),
        "num_output_tokens": np.array([3, 0, 5]),
        "times": np.array([2.0, 0.0, 1.0]),
    }
    return Trace(**(defaults | columns))  # type: ignore[arg-type]


def test_synthetic_lengths_depend_on_the_random_stream_alone() -> None:
    def draw(salt: str) -> tuple[list[int], str]:
        workload = synthetic_workload(
            "random",
            num_requests=20,
            prompt_lengths=UniformLength(30, 0.5),
            output_lengths=UniformLength(4, 0.0),
            writer=PromptWriter(estimated_pool(), salt),
            rng=np.random.default_rng(5),
        )
        return workload.num_prompt_tokens.tolist(), workload.request(0).prompt

    assert draw("a")[0] == draw("b")[0]
    assert draw("a")[1] != draw("b")[1]


def test_a_trace_becomes_requests_in_order_of_time() -> None:
    workload = trace_workload(trace(), num_requests=None, writer=WRITER)

    assert workload.times is not None
    assert workload.times.tolist() == [0.0, 1.0, 2.0]
    assert [workload.request(i).max_tokens for i in range(3)] == [1, 5, 3]
    assert [len(workload.request(i).prompt.split()) for i in range(3)] == [12, 1, 9]


def test_blocks_of_a_trace_repeat_as_text() -> None:
    columns = {
        "num_prompt_tokens": np.array([6, 6, 6]),
        "block_ids": ((1, 2), (1, 3), (4, 5)),
        "block_size": 4,
    }
    workload = trace_workload(trace(**columns), num_requests=None, writer=WRITER)  # in time: rows 1, 2, 0

    prompts = [workload.request(i).prompt.split() for i in range(3)]
    assert prompts[0][:4] == prompts[2][:4] != prompts[1][:4]


def test_a_trace_is_not_stretched() -> None:
    with pytest.raises(ConfigError, match="the trace has 3 requests, and --num-prompts is 4"):
        trace_workload(trace(), num_requests=4, writer=WRITER)


def test_an_empty_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        shared_prefix_workload(
            "random",
            num_prefix_tokens=1,
            groups=np.empty(0, dtype=np.int64),
            num_own_tokens=np.empty(0, dtype=np.int64),
            max_tokens=np.empty(0, dtype=np.int64),
            writer=WRITER,
        )
