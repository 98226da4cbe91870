"""What counters and histograms did between two looks at a server."""

from __future__ import annotations

from dataclasses import dataclass

from onbeat.metrics.exposition import Scrape, quantile


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
