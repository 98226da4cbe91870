"""Read the text that a server shows Prometheus: names, labels and values, no more."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Scrape:
    """The samples of one moment.

    Parameters
    ----------
    samples : name as in the text -> labels -> value.
    """

    def __init__(self, samples: Mapping[str, Mapping[Labels, float]]) -> None:
        self._samples = samples

    def value(self, name: str, **labels: str) -> float | None:
        """Return a sample's value; None where there is none with exactly these labels."""
        return self._samples.get(name, {}).get(frozenset(labels.items()))

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum over all samples that have these labels, whatever else; None of none."""
        wanted = labels.items()
        values = [value for own, value in self._samples.get(name, {}).items() if wanted <= own]
        return sum(values) if values else None

    def label_values(self, name: str, label: str) -> list[str]:
        """Return the values of a label, each once, in the order of the text."""
        found = (dict(labels).get(label) for labels in self._samples.get(name, {}))
        return list(dict.fromkeys(value for value in found if value is not None))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return a histogram's upper bounds and the values up to them, ascending; empty without one."""
        wanted = labels.items()
        found = {}
        for own, value in self._samples.get(f"{name}_bucket", {}).items():
            if wanted <= own:
                found[float(dict(own)["le"])] = value
        return dict(sorted(found.items()))


def read_exposition(text: str) -> Scrape:
    """Read Prometheus' text format.

    Raises
    ------
    ValueError : a line is neither a comment nor a sample.
    """
    samples: dict[str, dict[Labels, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return Scrape(samples)


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """Estimate a quantile from cumulative buckets, evenly spread within each; None of no values.

    Parameters
    ----------
    buckets : upper bound -> values up to it, ascending, the last bound infinite.
    q : in [0, 1].

    Notes
    -----
    As Prometheus' `histogram_quantile`: the first bucket starts at 0 (or is its bound, below 0), and a value
    beyond the last finite bound is that bound.
    """
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    rank = q * total
    low, below = 0.0, 0.0
    for bound, count in buckets.items():
        if count >= rank and count > below:
            if math.isinf(bound) or bound <= low:
                return low if math.isinf(bound) else bound
            return low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low


@dataclass(frozen=True, slots=True)
class ScrapeWindow:
    """The time from one scrape to a later one of the same server process."""

    old: Scrape | None
    """None: the start of the server, when all was 0."""
    new: Scrape
    seconds: float | None
    """Its length; None where that is not known."""

    def delta(self, name: str, **labels: str) -> float | None:
        """Return by how much samples with these labels grew together; None where there are none."""
        new = self.new.total(name, **labels)
        if new is None or self.old is None:
            return new
        return new - (self.old.total(name, **labels) or 0.0)

    def rate(self, name: str, **labels: str) -> float | None:
        """Return the growth per second."""
        delta = self.delta(name, **labels)
        return None if delta is None or not self.seconds else delta / self.seconds

    def mean(self, histogram: str, **labels: str) -> float | None:
        """Return the mean of the values that a histogram took in; None if it took none."""
        return self.share(f"{histogram}_sum", f"{histogram}_count", **labels)

    def share(self, part: str, whole: str, **labels: str) -> float | None:
        """Return by how much one counter grew for each one that another grew; None if that stood still."""
        numerator, denominator = self.delta(part, **labels), self.delta(whole, **labels)
        return None if numerator is None or not denominator else numerator / denominator

    def quantile(self, histogram: str, q: float, **labels: str) -> float | None:
        """Return a quantile of the values that a histogram took in; None if it took none."""
        buckets = self.new.buckets(histogram, **labels)
        if self.old is not None:
            before = self.old.buckets(histogram, **labels)
            buckets = {bound: count - before.get(bound, 0.0) for bound, count in buckets.items()}
        return quantile(buckets, q)
