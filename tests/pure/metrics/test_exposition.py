from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from onbeat.core.step import SchedulerState
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.exposition import ScrapeWindow, quantile, read_exposition
from onbeat.metrics.tracker import RequestTracker
from tests.pure.metrics.runs import run_one, stats


@pytest.mark.parametrize("model_name", ["m", 'a "quoted" name', "back\\slash", "two\nlines", "a,b={c}"])
def test_everything_that_a_server_shows_is_read_as_prometheus_reads_it(model_name: str) -> None:
    counts = RunCounts()
    run_one(RequestTracker([counts]))
    counts.on_step(stats(1.0, 1.5, budget_seconds=0.4, scheduler=SchedulerState(decode_slacks=[-0.1, 0.2])))
    text = MetricsExporter(counts, model_name=model_name, aliases="vllm").render()[0].decode()
    scrape = read_exposition(text)
    num_samples = 0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            num_samples += 1
            assert scrape.value(sample.name, **sample.labels) == sample.value
    assert num_samples > 500


def test_values_labels_and_timestamps() -> None:
    text = '# a comment\n\nplain 1\nwith{a="1",b="2"} 2e3\nwith{a="1",b="3",} +Inf\nold{a="x"} 4 1700000000\n'
    scrape = read_exposition(text)
    assert scrape.value("plain") == 1
    assert scrape.value("with", a="1", b="2") == 2000
    assert scrape.value("with", a="1") is None
    assert scrape.total("with", a="1") == math.inf
    assert scrape.value("old", a="x") == 4
    assert scrape.label_values("with", "b") == ["2", "3"]
    assert (scrape.value("none"), scrape.total("none"), scrape.buckets("none")) == (None, None, {})


@pytest.mark.parametrize("text", ["<html>", "name", "name one", "name{a=1} 2", 'name{a="1" 2', "{} 3"])
def test_what_is_no_metric_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"invalid metric name|Invalid labels|could not convert|^$"):
        read_exposition(text)


@given(
    st.lists(st.floats(0, 50), min_size=1),
    st.lists(st.floats(0.1, 60), min_size=1, unique=True).map(sorted),
    st.floats(0, 1),
)
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values, bounds, q: float) -> None:
    counts = [0] * (len(bounds) + 1)
    for value in values:
        counts[bisect_left(bounds, value)] += 1
    buckets = dict(zip([*bounds, math.inf], accumulate(map(float, counts)), strict=True))
    got = quantile(buckets, q)
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


def test_quantiles_are_interpolated() -> None:
    assert quantile({1.0: 0, 2.0: 10, math.inf: 10}, 0.5) == pytest.approx(1.5)
    assert quantile({1.0: 5, math.inf: 10}, 0.99) == 1.0  # all that is known
    assert quantile({1.0: 0, math.inf: 0}, 0.5) is None
    assert quantile({}, 0.5) is None
    values = np.random.default_rng(0).uniform(0, 1, 10_000)
    buckets = {bound: float((values <= bound).sum()) for bound in np.linspace(0.1, 1.0, 10).tolist()}
    assert quantile({**buckets, math.inf: 10_000}, 0.99) == pytest.approx(0.99, abs=0.01)


def scrape_of(total: float, *, ended: dict[str, float], buckets: tuple[float, float]) -> str:
    lines = [f"n_total {total}"]
    lines += [f'ended_total{{outcome="{name}"}} {number}' for name, number in ended.items()]
    lines += [f'h_bucket{{le="1.0"}} {buckets[0]}', f'h_bucket{{le="+Inf"}} {buckets[1]}']
    lines += [f"h_sum {total / 2}", f"h_count {buckets[1]}"]
    return "\n".join(lines)


def test_a_window_is_what_happened_in_it() -> None:
    old = read_exposition(scrape_of(100, ended={"good": 5}, buckets=(0, 50)))
    new = read_exposition(scrape_of(140, ended={"good": 8, "bad": 2}, buckets=(10, 60)))
    window = ScrapeWindow(old, new, 10.0)
    assert (window.delta("n_total"), window.rate("n_total")) == (40, 4)
    assert window.delta("ended_total") == 5  # a label that is new began at 0
    assert window.mean("h") == pytest.approx(20 / 10)
    assert window.quantile("h", 0.5) == pytest.approx(0.5)
    assert window.share("ended_total", "n_total") == pytest.approx(5 / 40)
    assert (window.delta("none"), window.rate("none"), window.mean("none")) == (None, None, None)


def test_a_window_without_a_beginning_is_all_there_was() -> None:
    new = read_exposition(scrape_of(140, ended={"good": 8}, buckets=(10, 60)))
    assert ScrapeWindow(None, new, 70.0).rate("n_total") == 2
    assert ScrapeWindow(None, new, None).rate("n_total") is None
    assert ScrapeWindow(new, new, 1.0).mean("h") is None  # nothing was observed in it
