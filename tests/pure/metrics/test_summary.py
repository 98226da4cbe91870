"""The numbers of a load test, against hand-worked values and an independent implementation."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.metrics.distribution import bootstrap_draws, percentile, percentile_name
from onbeat.metrics.summary import (
    SummaryOptions,
    collect_samples,
    is_good,
    peak_concurrency,
    peak_output_rate,
    summarise,
)
from onbeat.report.run import summary_values


@dataclass
class Measured:
    arrival: float
    delivery_times: Sequence[float]
    num_output_tokens: int = 0
    num_prompt_tokens: int = 10
    is_completed: bool = True
    is_rejected: bool = False
    is_expired: bool = False
    end: float = field(default=0.0)
    delivery_sizes: Sequence[int] = ()
    slo: SLO | None = None
    request_class: str | None = None
    is_streamed: bool = True
    tenant: str | None = None

    @property
    def offered_prompt_tokens(self) -> int:
        return self.num_prompt_tokens

    @property
    def sent(self) -> float:
        return self.arrival

    def __post_init__(self) -> None:
        self.num_output_tokens = self.num_output_tokens or len(self.delivery_times)
        self.end = self.end or (self.delivery_times[-1] if self.delivery_times else self.arrival)


def summary_of(requests: Sequence[Measured], **options: Any) -> dict[str, Any]:
    """The numbers under the keys of a saved result."""
    return summary_values(summarise(requests, **options))


def lost(arrival: float, *, rejected: bool = False) -> Measured:
    return Measured(arrival, [], is_completed=False, is_rejected=rejected, end=arrival + 0.5)


def test_hand_worked_run() -> None:
    requests = [
        Measured(0.0, [0.5, 0.6, 0.8], num_output_tokens=4),  # ttft 500, gaps 100 200, tpot 100, e2e 800
        Measured(1.0, [1.1, 1.4]),  # ttft 100, gap 300, tpot 300, e2e 400
        Measured(1.0, [1.3], num_output_tokens=1),  # ttft 300, no tpot, e2e 300
        lost(2.0),
        lost(2.0, rejected=True),
    ]

    result = summary_of(requests, duration=2.5, options=SummaryOptions(percentiles=(50, 90)))

    assert (result["completed"], result["failed"], result["rejected"]) == (3, 1, 1)
    assert result["total_input_tokens"] == 30
    assert result["total_output_tokens"] == 7
    assert result["output_throughput"] == pytest.approx(7 / 2.5)
    assert result["total_token_throughput"] == pytest.approx(37 / 2.5)
    assert result["request_throughput"] == pytest.approx(3 / 2.5)
    assert result["mean_ttft_ms"] == pytest.approx(300)
    assert result["p90_ttft_ms"] == pytest.approx(460)
    assert result["mean_tpot_ms"] == pytest.approx(200)
    assert result["mean_itl_ms"] == pytest.approx(200)
    assert result["max_itl_ms"] == pytest.approx(300)
    assert result["median_e2el_ms"] == pytest.approx(400)
    assert result["std_ttft_ms"] == pytest.approx(math.sqrt((200**2 + 200**2) / 3))
    assert result["request_goodput"] is None


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        ({"ttft": 0.5}, 3),
        ({"ttft": 0.4}, 2),
        ({"tpot": 0.15}, 2),  # a single token has no gap to miss
        ({"tbt": 0.25}, 2),
        ({"e2el": 0.35}, 1),
        ({"ttft": 0.4, "tpot": 0.15}, 1),
    ],
)
def test_goodput_counts_requests_that_meet_every_objective(objectives: dict[str, float], good: int) -> None:
    requests = [Measured(0.0, [0.5, 0.6, 0.8], 4), Measured(1.0, [1.1, 1.4]), Measured(1.0, [1.3]), lost(2.0)]

    result = summary_of(requests, duration=2.0, options=SummaryOptions(objectives=objectives))

    assert result["request_goodput"] == pytest.approx(good / 2.0)
    assert result["attainment"] == pytest.approx(good / 4)


def test_no_completed_request_gives_none_not_zero() -> None:
    result = summary_of([lost(0.0)], duration=1.0)

    assert result["mean_ttft_ms"] is None
    assert result["p99_itl_ms"] is None
    assert result["output_throughput"] == 0


def test_percentiles_only_for_the_chosen_metrics() -> None:
    options = SummaryOptions(metrics=("ttft",), percentiles=(99.9,))

    result = summary_of([Measured(0.0, [1.0, 2.0])], duration=2.0, options=options)

    assert "p99.9_ttft_ms" in result
    assert "p99.9_tpot_ms" not in result
    assert result["mean_tpot_ms"] == pytest.approx(1000)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys_linear_interpolation(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)), rel=1e-9, abs=1e-6)


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_percentile_names() -> None:
    assert [percentile_name(p) for p in (50.0, 99.9)] == ["p50", "p99.9"]


@pytest.mark.parametrize(
    "options",
    [{"percentiles": (101.0,)}, {"objectives": {"ttft": 0.0}}, {"objectives": {"latency": 1.0}}],
)
def test_bad_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        SummaryOptions(**options)  # type: ignore[arg-type]


def test_peak_concurrency_frees_a_place_before_it_is_taken() -> None:
    requests = [Measured(0.0, [1.0]), Measured(1.0, [2.0]), Measured(1.5, [3.0])]

    assert peak_concurrency(requests) == 2


def test_peak_output_rate_spreads_tokens_over_deliveries() -> None:
    requests = [Measured(0.0, [0.1, 0.2, 1.15], num_output_tokens=6)]

    assert summary_of(requests, duration=2.0)["max_output_tokens_per_s"] == pytest.approx(4)


def test_peak_output_rate_of_an_age() -> None:
    requests = [Measured(0.0, [0.1, 0.2], num_output_tokens=6), Measured(1e300, [1e300], num_output_tokens=1)]

    assert peak_output_rate(requests) == pytest.approx(6)


def test_failed_requests_are_never_good() -> None:
    assert not is_good(lost(0.0), {"ttft": 100.0})


def test_a_bootstrap_covers_the_mean_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        groups = [rng.normal(5.0, 1.0, size=4) for _ in range(25)]
        draws = bootstrap_draws(groups, lambda v: float(v.mean()), rng, num_resamples=200)
        hits += percentile(draws, 2.5) <= 5.0 <= percentile(draws, 97.5)
    assert 48 <= hits <= 60


def test_bootstrap_draws_whole_groups() -> None:
    # Two groups of equal values: the mean of any resample is 0, 0.5 or 1, never between.
    groups = [np.zeros(10), np.ones(10)]

    draws = bootstrap_draws(groups, lambda v: float(v.mean()), np.random.default_rng(0))

    assert set(draws) == {0.0, 0.5, 1.0}


def test_bootstrap_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="one value"):
        bootstrap_draws([np.empty(0)], lambda v: float(v.mean()), np.random.default_rng(0))


# Another load client's definitions, applied to the same chunk times.

STORED = [
    Measured(10.0, [10.13, 10.16, 10.2, 10.31], 4),
    Measured(10.2, [10.61, 10.65, 10.66], 6),
    Measured(10.9, [11.4, 11.41, 11.55, 11.6, 11.72], 5),
    Measured(11.0, [11.05, 11.9], 2),
]


def test_stored_chunk_times_give_the_recorded_values() -> None:
    result = summary_of(STORED, duration=2.0, options=SummaryOptions(objectives={"ttft": 0.45, "tbt": 0.2}))

    assert result["output_throughput"] == pytest.approx(8.5)
    assert result["mean_ttft_ms"] == pytest.approx(272.5)
    assert result["p50_ttft_ms"] == pytest.approx(270.0)
    assert result["p90_ttft_ms"] == pytest.approx(473.0)
    assert result["p99_ttft_ms"] == pytest.approx(497.3)
    assert result["mean_tpot_ms"] == pytest.approx((60 + 10 + 80 + 850) / 4)
    assert result["p90_tpot_ms"] == pytest.approx(619.0)
    assert result["mean_itl_ms"] == pytest.approx((180 + 50 + 320 + 850) / 10)
    assert result["p50_itl_ms"] == pytest.approx(45.0)
    assert result["p90_itl_ms"] == pytest.approx(211.0)
    assert result["p99_itl_ms"] == pytest.approx(786.1)
    assert result["mean_e2el_ms"] == pytest.approx((310 + 460 + 820 + 900) / 4)
    assert result["attainment"] == pytest.approx(0.5)


@pytest.fixture
def other_client() -> ModuleType:
    shared = os.environ.get("ONBEAT_SHARED")
    if not shared:
        pytest.skip("ONBEAT_SHARED is not set: the second load client is not at hand")
    spec = importlib.util.spec_from_file_location("other_client", Path(shared) / "bench" / "load.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_agrees_with_the_second_client_on_the_same_chunk_times(other_client: ModuleType) -> None:
    rng = np.random.default_rng(11)
    requests = list(STORED)
    for _ in range(60):
        start = float(rng.uniform(0, 20))
        times = start + np.cumsum(rng.gamma(2.0, 0.02, size=int(rng.integers(2, 80))))
        requests.append(Measured(start, times.tolist(), len(times) + int(rng.integers(0, 9))))
    theirs = other_client.summarize(
        [
            {
                "error": None,
                "out": r.num_output_tokens,
                "want": r.num_output_tokens,
                "chunks": len(r.delivery_times),
                "prompt_tokens": r.num_prompt_tokens,
                "ttft": (r.delivery_times[0] - r.arrival) * 1e3,
                "e2e": (r.delivery_times[-1] - r.arrival) * 1e3,
                "tpot": (r.delivery_times[-1] - r.delivery_times[0]) * 1e3 / (r.num_output_tokens - 1),
                "tbt": [(b - a) * 1e3 for a, b in zip(r.delivery_times, r.delivery_times[1:], strict=False)],
            }
            for r in requests
        ],
        25.0,
        [(40.0, 90.0)],
    )

    ours = summary_of(requests, duration=25.0, options=SummaryOptions(objectives={"ttft": 0.04, "tbt": 0.09}))

    for their_name, name in {"ttft": "ttft", "tpot": "tpot", "e2e": "e2el", "tbt": "itl"}.items():
        for statistic in ("mean", "p50", "p90", "p99", "max"):
            assert ours[f"{statistic}_{name}_ms"] == pytest.approx(theirs[their_name][statistic], rel=1e-12)
    assert collect_samples(requests)["itl"].size == theirs["tbt"]["n"]
    assert ours["output_throughput"] == pytest.approx(theirs["out_tok_s"], rel=1e-12)
    assert ours["attainment"] == pytest.approx(theirs["goodput_40:90"]["p99_tbt"])
