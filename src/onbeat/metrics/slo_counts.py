"""Count kept and broken promises by class of objectives, since the start and of late.

A class is a name from the server's list, so that the number of time series stays small; requests with
objectives of their own and no class are counted as `unnamed`.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import replace
from itertools import chain

from onbeat.core.slo import SLO, SLOMode
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.buckets import TBT_SECONDS, TTFT_SECONDS
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.record import RequestRecord

UNNAMED = "unnamed"
OUTCOMES = ("good", "bad", "rejected", "expired", "abandoned")
"""What became of a request. `abandoned`: its caller left while its promise was still kept; not judged."""
WINDOW_SECONDS = 60.0
"""What "of late" is."""


class ClassCounts:
    """The requests of one class."""

    def __init__(self) -> None:
        self.objectives = SLO()
        """Those of its latest request."""
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.ttft = Histogram(TTFT_SECONDS)
        self.gap = Histogram(TBT_SECONDS)
        self._recent: deque[tuple[float, bool]] = deque()
        """(end, whether it was good) of the judged requests of late, by end."""

    def take(self, end: float, outcome: str) -> None:
        """Count a request that ended."""
        self.outcomes[outcome] += 1
        if outcome != "abandoned":
            self._recent.append((end, outcome == "good"))
            self._forget(end)

    def recent(self, now: float) -> tuple[int, int]:
        """Return how many judged requests have ended of late, and how many of them were good."""
        self._forget(now)
        return len(self._recent), sum(is_good for _, is_good in self._recent)

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0][0] <= now - WINDOW_SECONDS:
            self._recent.popleft()


class SLOCounts:
    """Counts requests with objectives; those without are none of its business.

    Parameters
    ----------
    mode : what keeping a TBT objective means (see `attainment`).
    """

    def __init__(self, mode: SLOMode = "stream") -> None:
        self.mode = mode
        self.classes: dict[str, ClassCounts] = {}

    def on_request(self, record: RequestRecord) -> None:
        """Note a class and its objectives as soon as it has a request."""
        if record.slo is not None and has_objectives(record):
            self._class(record).objectives = record.slo

    def on_delivery(self, record: RequestRecord) -> None:
        """Count the time since the delivery before or since the arrival."""
        if not has_objectives(record):
            return
        times = record.delivery_times
        if len(times) > 1:
            self._class(record).gap.observe(times[-1] - times[-2])
        else:
            self._class(record).ttft.observe(times[0] - record.arrival)

    def on_finish(self, record: RequestRecord) -> None:
        """Judge a request."""
        if has_objectives(record):
            self._class(record).take(record.end, self._outcome(record))

    def _class(self, record: RequestRecord) -> ClassCounts:
        name = record.request_class or UNNAMED
        if name not in self.classes:
            self.classes[name] = ClassCounts()
        return self.classes[name]

    def _outcome(self, record: RequestRecord) -> str:
        if record.finish_reason in ("rejected", "expired"):
            return record.finish_reason
        if record.finish_reason == "abort":
            # Judged as far as it came: a caller who has waited too long for a token was not served in time.
            return "abandoned" if self._is_good(replace(record, finish_reason="stop")) else "bad"
        return "good" if self._is_good(record) else "bad"

    def _is_good(self, record: RequestRecord) -> bool:
        return bool(good_requests([record], mode=self.mode)[0])


def objectives_by_class(counts: SLOCounts) -> dict[tuple[str, ...], float | None]:
    """Return (class, `ttft`, `tbt` or `e2e`) -> seconds, None where nothing is promised."""
    return dict(
        chain.from_iterable(_objectives(name, own.objectives) for name, own in counts.classes.items())
    )


def _objectives(name: str, slo: SLO) -> list[tuple[tuple[str, ...], float | None]]:
    return [((name, "ttft"), slo.ttft), ((name, "tbt"), slo.tbt), ((name, "e2e"), slo.e2e)]
