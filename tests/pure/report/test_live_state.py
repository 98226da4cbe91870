"""What is seen of a server over time."""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import SLOUnattainable
from onbeat.report.live_frame import LATENCY_SECONDS, StateHistory, Window, quantile
from tests.pure.metrics.fake_server import FakeServer


def test_the_first_look_is_at_all_there_was() -> None:
    server, history = FakeServer(), StateHistory()
    server.serve("a", 0.0, [0.5, 0.6])
    server.open("b", 1.0)
    history.add(server.state(10.0))
    seen = history.window(10.0)
    assert seen.old is None
    assert seen.uptime == pytest.approx(10)
    assert (seen.value("requests_running"), seen.value("requests_waiting")) == (0, 1)
    assert seen.rate("requests_total") == pytest.approx(0.1)
    assert seen.rate("output_tokens_total") == pytest.approx(0.2)


def test_a_window_is_what_happened_in_it() -> None:
    server, history = FakeServer(), StateHistory()
    history.add(server.state(0.0))
    server.serve("slow", 0.0, [0.9, 0.95])
    server.step(0.0, 0.5, rows=[(10, 1)])
    for now in range(1, 41):
        history.add(server.state(float(now)))
    server.serve("quick", 40.0, [0.09, 0.14])
    server.step(40.0, 40.1, rows=[(10, 1), (10, 1), (0, 32)], predicted_seconds=0.08, budget_seconds=0.09)
    history.add(server.state(41.0))
    recent, longer = history.window(10.0), history.window(60.0)
    assert (recent.seconds, longer.seconds) == pytest.approx((10, 41))
    assert recent.rate("requests_total") == pytest.approx(0.1)
    assert (recent.mean("step_decodes"), recent.mean("step_chunk_tokens")) == (2, 32)
    assert (recent.mean("step_seconds"), recent.mean("step_predicted_seconds")) == pytest.approx((0.1, 0.08))
    assert recent.quantile("step_budget_seconds", 0.5) == pytest.approx(0.0875, abs=0.0125)
    assert longer.attainment("chat") == 1.0
    assert longer.rate("slo_requests_total", "chat", "good") == pytest.approx(2 / 41)
    assert longer.value("slo_objective_seconds", "chat", "ttft") == 1.0
    ttft = [longer.quantile("slo_time_to_first_token_seconds", q, "chat") for q in (0.5, 0.99)]
    assert ttft[0] is not None
    assert ttft[1] is not None
    assert ttft[0] <= 0.1 < 0.8 < ttft[1] <= 0.9  # both requests
    assert (recent.value("none"), recent.rate("none"), recent.mean("none")) == (None, None, None)


def test_looks_older_than_a_minute_are_forgotten() -> None:
    server, history = FakeServer(), StateHistory()
    history.add(server.state(0.0))
    server.serve("old", 0.0, [0.5])
    for now in range(10, 200, 10):
        history.add(server.state(float(now)))
    seen = history.window(LATENCY_SECONDS)
    assert seen.seconds == pytest.approx(LATENCY_SECONDS)
    assert seen.quantile("slo_time_to_first_token_seconds", 0.5, "chat") is None


def test_the_rates_and_the_attainment_of_a_class_are_of_one_time() -> None:
    server, history = FakeServer(), StateHistory()
    for now in range(90):
        name = str(now)
        server.serve(name, float(now), [0.5 if now % 4 else 1.5])
        server.open(f"refused {now}", float(now))
        server.tracker.refuse(f"refused {now}", SLOUnattainable("no", predicted_ttft=5.0), now + 0.1)
        history.add(server.state(now + 0.9))
        seen = history.window(LATENCY_SECONDS)
        rates = [seen.rate("slo_requests_total", "chat", outcome) for outcome in ("*", "good")]
        assert rates[0] is not None
        assert rates[1] is not None
        assert seen.attainment("chat") == pytest.approx(rates[1] / rates[0])
    assert rates == pytest.approx([2.0, 0.75], rel=0.03)


def test_a_server_that_was_started_anew_begins_anew() -> None:
    server, history = FakeServer(), StateHistory()
    server.serve("a", 0.0, [0.5])
    server.step(0.0, 0.5)
    history.add(server.state(0.0))
    history.add(server.state(1.0))
    history.add(FakeServer().state(50.0))
    seen = history.window(10.0)
    assert seen.old is None
    assert seen.rate("requests_total") == 0


@given(
    st.lists(st.floats(0, 50), min_size=1),
    st.lists(st.floats(0.1, 60), min_size=1, unique=True).map(sorted),
    st.floats(0, 1),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values, bounds, q: float) -> None:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    got = quantile(bounds, counts, q)
    assert got is not None
    # Between the order statistics around rank q x n, each as far as its bucket tells.
    ordered = sorted(values)
    rank = q * len(values)
    low = ordered[max(math.ceil(rank - 1e-9) - 1, 0)]
    high = ordered[min(math.floor(rank), len(values) - 1)]
    edges = [0.0, *bounds]
    at_least = edges[min(bisect_left(bounds, low), len(bounds))]
    at_most = bounds[min(bisect_left(bounds, high), len(bounds) - 1)]
    assert at_least - 1e-9 <= got <= max(at_most, at_least) + 1e-9


@pytest.mark.parametrize(
    ("bounds", "counts", "q", "expected"),
    [
        ([1.0, 2.0], [0, 10, 0], 0.5, 1.5),
        ([1.0], [5, 5], 0.99, 1.0),  # all that is known
        ([1.0], [0, 0], 0.5, None),
        ([], [], 0.5, None),
        ([-0.5, 0.0, 0.5], [4, 0, 0, 0], 0.5, -0.5),  # the first bucket is its bound, below 0
    ],
)
def test_quantiles_are_interpolated(bounds: list[float], counts: list[int], q: float, expected: Any) -> None:
    assert quantile(bounds, counts, q) == expected


def test_a_quantile_of_many_values_is_near() -> None:
    values = np.random.default_rng(0).uniform(0, 1, 10_000)
    bounds = np.linspace(0.1, 1.0, 10).tolist()
    counts = [*np.histogram(values, [0.0, *bounds])[0].tolist(), 0]
    assert quantile(bounds, counts, 0.99) == pytest.approx(0.99, abs=0.01)


def test_a_label_that_is_new_began_at_0() -> None:
    old = {"unix_time": 1.0, "start_time": 0.0, "ended_total": {"good": 5}}
    new = {"unix_time": 11.0, "start_time": 0.0, "ended_total": {"good": 8, "bad": 2}}
    assert Window(old, new).delta("ended_total") == 5
    assert Window(old, new).rate("ended_total", "bad") == pytest.approx(0.2)
