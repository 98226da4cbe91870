"""Declared metrics as Prometheus' client writes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family

from onbeat.metrics.declare import Labels, Metric, by_label

_FAMILIES: dict[str, type[Any]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "info": GaugeMetricFamily,
}


def families(shown: Iterable[tuple[str, Metric, Labels, Any]]) -> Iterable[Family]:
    """Return the families of samples: names in `/metrics`, metrics, labels before their own, and values."""
    found: dict[str, Any] = {}
    for name, metric, outer, value in shown:
        if (family := found.get(name)) is None:
            labels = [*(label for label, _ in outer), *metric.labels]
            found[name] = family = _FAMILIES[metric.kind](name, metric.text, labels=labels)
        before = [word for _, word in outer]
        for words, own in by_label(metric, value):
            if metric.kind == "histogram":
                family.add_metric([*before, *words], own.cumulative(), own.sum)
            else:
                family.add_metric([*before, *words], own)
    return found.values()
