"""Prometheus metric families from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from onbeat.metrics.histogram import Histogram

Labels = Mapping[str, str]
Names = str | tuple[str, ...]
"""Names of labels, or their values; a text is of the only label."""
KeyT = TypeVar("KeyT", bound=Names)


def gauge(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    """Return a gauge with one sample."""
    labels = labels or {}
    return gauges(name, text, tuple(labels), {tuple(labels.values()): value})


def gauges(name: str, text: str, labels: Names, values: Mapping[KeyT, float | None]) -> Metric:
    """Return a gauge with a sample for each set of label values; None is no sample."""
    family = GaugeMetricFamily(name, text, labels=_tuple(labels))
    for key, value in values.items():
        if value is not None:
            family.add_metric(_tuple(key), value)
    return family


def counter(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    """Return a counter with one sample; its name gets `_total` in the output."""
    labels = labels or {}
    return counters(name, text, tuple(labels), {tuple(labels.values()): value})


def counters(name: str, text: str, labels: Names, values: Mapping[KeyT, float]) -> Metric:
    """Return a counter with a sample for each set of label values."""
    family = CounterMetricFamily(name, text, labels=_tuple(labels))
    for key, value in values.items():
        family.add_metric(_tuple(key), value)
    return family


def histogram(name: str, text: str, value: Histogram, labels: Labels | None = None) -> Metric:
    """Return a histogram with one set of buckets."""
    labels = labels or {}
    return histograms(name, text, tuple(labels), {tuple(labels.values()): value})


def histograms(name: str, text: str, labels: Names, values: Mapping[KeyT, Histogram]) -> Metric:
    """Return a histogram with buckets for each set of label values."""
    family = HistogramMetricFamily(name, text, labels=_tuple(labels))
    for key, value in values.items():
        family.add_metric(_tuple(key), value.cumulative(), value.sum)
    return family


def _tuple(words: Names) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else words
