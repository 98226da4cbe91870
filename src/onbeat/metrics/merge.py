"""Counts of several processes shown as one: counters and histograms add up, nothing else does."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from onbeat.core.request import FinishReason
from onbeat.metrics.declare import Labels, Metric, by_label
from onbeat.metrics.histogram import Histogram


class Sample(NamedTuple):
    """One number of a metric, or one histogram."""

    metric: Metric
    outer: Labels
    """Labels of the part that it is of."""
    words: tuple[str, ...]
    """Values of the metric's own labels."""
    value: Any

    @property
    def adds_up(self) -> bool:
        """Whether the sum over processes is the truth."""
        return self.metric.kind in ("counter", "histogram")


_Key = tuple[str, Labels, tuple[str, ...]]
Snapshot = list[tuple[str, Labels, tuple[str, ...], Any]]
"""Name of a metric, labels of its part, values of its own labels, and the number or `Histogram.as_dict`."""


def flat(shown: Iterable[tuple[Metric, Labels, Any]]) -> Iterator[Sample]:
    """Yield what `declare.samples` yields, one label at a time."""
    for metric, outer, value in shown:
        for words, own in by_label(metric, value):
            yield Sample(metric, outer, words, own)


def snapshot(samples: Iterable[Sample]) -> Snapshot:
    """Return what another process is to add."""
    return [
        (each.metric.name, each.outer, each.words, _plain(each.value)) for each in samples if each.adds_up
    ]


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Histogram) else value


class Others:
    """What other processes have counted, those that have ended included.

    Parameters
    ----------
    metrics : all that there are, by name.
    """

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self._metrics = metrics
        self._latest: dict[str, Snapshot] = {}
        self._ended: dict[_Key, Any] = {}

    def hear(self, name: str, counted: Snapshot) -> None:
        """Take what a process has counted since its start."""
        self._latest[name] = counted

    def end(self, name: str, num_open: int) -> None:
        """Keep what a process had counted that has ended: counters never fall.

        The requests that it had open were aborted with it; so count those whose ends it had yet to tell.
        """
        aborted = "requests_total", (), (FinishReason.ABORT.value,), num_open
        _add(self._ended, [*self._latest.pop(name, ()), aborted])

    def added_to(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield samples with what others have counted, and then what they alone have."""
        totals = {key: _plain(value) for key, value in self._ended.items()}
        for counted in self._latest.values():
            _add(totals, counted)
        for sample in samples:
            key = sample.metric.name, sample.outer, sample.words
            theirs = totals.pop(key, None) if sample.adds_up else None
            yield sample if theirs is None else sample._replace(value=_sum(theirs, _plain(sample.value)))
        for (name, outer, words), value in totals.items():
            yield Sample(self._metrics[name], outer, words, _sum(value, None))


def _add(totals: dict[_Key, Any], counted: Snapshot) -> None:
    for name, outer, words, value in counted:
        key = name, outer, words
        totals[key] = _plain(_sum(value, totals.get(key)))


def _sum(value: Any, other: Any) -> Any:
    """Return the sum of two numbers, or two histograms as they are sent; None adds nothing."""
    if not isinstance(value, Mapping):
        return value + (other or 0)
    total = Histogram(value["bounds"])
    for each in filter(None, (value, other)):
        total.add(each["counts"], each["sum"])
    return total
