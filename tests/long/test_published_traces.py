"""The published traces are read as they were described; needs them (ONBEAT_SHARED)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onbeat.workload.load import Load, LoadName
from onbeat.workload.trace import read_trace


def published(name: str) -> Path:
    shared = os.environ.get("ONBEAT_SHARED")
    if not shared:
        pytest.skip("ONBEAT_SHARED is not set: the published traces are not at hand")
    return Path(shared) / "data" / "traces" / name


@pytest.mark.parametrize(
    ("name", "count", "input_mean", "output_mean", "seconds", "input_p90"),
    [
        ("azure2023_code.csv.gz", 8819, 2047.8, 27.9, 3436, 5194),
        ("azure2023_conv.csv.gz", 19366, 1154.7, 211.1, 3502, 2735),
        ("mooncake_fast25_conversation_trace.csv.gz", 12031, 12035, 342.6, 3537, 27367),
        ("mooncake_fast25_synthetic_trace.csv.gz", 3993, 15325, 149, 1022, None),
        ("sharegpt_8k_lengths_llama2tok.csv.gz", 30731, 2340, 438.7, None, 5696),
        ("arxiv_4k_lengths_llama2tok.csv.gz", 28257, 2588.1, 291.4, None, 3702),
    ],
)
def test_published_traces_have_their_published_statistics(
    name: str,
    count: int,
    input_mean: float,
    output_mean: float,
    seconds: float | None,
    input_p90: float | None,
) -> None:
    trace = read_trace(published(name))

    assert len(trace) == count
    assert trace.num_prompt_tokens.mean() == pytest.approx(input_mean, rel=0.005)
    assert trace.num_output_tokens.mean() == pytest.approx(output_mean, rel=0.005)
    assert (trace.times is None) == (seconds is None)
    if trace.times is not None:
        assert np.ptp(trace.times) == pytest.approx(seconds, rel=0.005)
    if input_p90 is not None:
        assert np.percentile(trace.num_prompt_tokens, 90) == pytest.approx(input_p90, rel=0.005)


def test_azure_code_arrivals_are_as_bursty_as_published() -> None:
    trace = read_trace(published("azure2023_code.csv.gz"))

    assert trace.times is not None
    gaps = np.diff(np.sort(trace.times))
    assert gaps.std() / gaps.mean() == pytest.approx(13.2, rel=0.005)


@pytest.mark.parametrize(
    ("name", "ratio"),
    [("mooncake_fast25_conversation_trace.csv.gz", 0.366), ("mooncake_fast25_synthetic_trace.csv.gz", 0.640)],
)
def test_mooncake_blocks_repeat_as_published(name: str, ratio: float) -> None:
    trace = read_trace(published(name))

    assert trace.block_ids is not None
    seen: set[int] = set()
    hits = total = 0
    for block_ids in trace.block_ids:
        hits += sum(block_id in seen for block_id in block_ids)
        total += len(block_ids)
        seen.update(block_ids)
    assert hits / total == pytest.approx(ratio, abs=0.002)


@pytest.mark.parametrize(
    ("name", "file", "rate", "percentiles"),
    [
        ("azure", "azure2023_code.csv.gz", 2.567, {"p50": (1469, 13), "p90": (5194, 55), "p99": (7436, 252)}),
        (
            "azure",
            "azure2023_conv.csv.gz",
            5.53,
            {"p50": (1020, 129), "p90": (2735, 424), "p99": (4142, 601)},
        ),
        ("mooncake", "mooncake_fast25_conversation_trace.csv.gz", 3.40, {"p50": (6909, 350)}),
        ("mooncake", "mooncake_fast25_synthetic_trace.csv.gz", 3.91, {"p50": (11587, 69)}),
        ("lengths", "sharegpt_8k_lengths_llama2tok.csv.gz", None, {"p50": (1730, 415), "p90": (5696, 834)}),
        ("lengths", "arxiv_4k_lengths_llama2tok.csv.gz", None, {"p50": (2730, 167), "p90": (3702, 372)}),
    ],
)
def test_published_statistics_of_loads(
    name: LoadName, file: str, rate: float | None, percentiles: dict[str, tuple[int, int]]
) -> None:
    spread: dict[str, Any] = {"max_concurrency": 1} if rate is None else {"arrivals": "replay"}
    load = Load(dataset_name=name, dataset_path=published(file), **spread).offered()

    assert load.rate == (None if rate is None else pytest.approx(rate, rel=0.005))
    for p, (num_prompt_tokens, num_output_tokens) in percentiles.items():
        found = np.percentile(load.num_prompt_tokens, float(p[1:]))
        assert found == pytest.approx(num_prompt_tokens, rel=0.005)
        found = np.percentile(load.num_output_tokens, float(p[1:]))
        assert found == pytest.approx(num_output_tokens, rel=0.005)
