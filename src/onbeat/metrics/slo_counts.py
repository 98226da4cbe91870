"""Count kept and missed objectives by class, since the start and of late.

A class is a name from the server's list, so that the number of time series stays small; requests with
objectives of their own and no class are counted as `unnamed`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from onbeat.core.slo import SLO, SLOMode
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.breakdown import Outcomes, has_ttft, wait_of
from onbeat.metrics.buckets import TBT_SECONDS, TTFT_SECONDS
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.record import RequestRecord

UNNAMED = "unnamed"
OUTCOMES = ("good", "bad", "rejected", "expired", "abandoned")
"""What became of a request. `abandoned`: its caller left while its objectives were still kept; not judged."""
WINDOW_SECONDS = 60.0
"""What "of late" is."""


class EndedRequest(NamedTuple):
    """What is remembered of a judged request."""

    end: float
    prompt_tokens: int
    wait: float
    """Seconds, as `breakdown` defines it."""
    is_ttft: bool
    is_good: bool


class ClassCounts:
    """The requests of one class."""

    def __init__(self) -> None:
        self.objectives = SLO()
        """Those of its latest request."""
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.ttft = Histogram(TTFT_SECONDS)
        self.gap = Histogram(TBT_SECONDS)
        self._recent: deque[EndedRequest] = deque()
        """The judged requests of late, by end."""

    def take(self, record: RequestRecord, outcome: str) -> None:
        """Count a request that ended."""
        self.outcomes[outcome] += 1
        if outcome != "abandoned":
            self._recent.append(
                EndedRequest(
                    end=record.end,
                    prompt_tokens=record.offered_prompt_tokens,
                    wait=wait_of(record),
                    is_ttft=has_ttft(record),
                    is_good=outcome == "good",
                )
            )
            self._forget(record.end)

    def recent(self, now: float) -> Sequence[EndedRequest]:
        """Return the judged requests that have ended of late."""
        self._forget(now)
        return self._recent

    def _forget(self, now: float) -> None:
        while self._recent and self._recent[0].end <= now - WINDOW_SECONDS:
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
            self._class(record).take(record, self._outcome(record))

    def recent(self, now: float) -> Outcomes:
        """Return the judged requests of all classes that have ended of late, by class and end."""
        ended = list(chain.from_iterable(own.recent(now) for own in self.classes.values()))
        return Outcomes(
            prompt_tokens=np.array([each.prompt_tokens for each in ended], dtype=np.int64),
            waits=np.array([each.wait for each in ended], dtype=np.float64),
            is_ttft=np.array([each.is_ttft for each in ended], dtype=np.bool_),
            is_good=np.array([each.is_good for each in ended], dtype=np.bool_),
        )

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
    """Return (class, `ttft`, `tbt` or `e2e`) -> seconds, None where there is no objective."""
    return dict(
        chain.from_iterable(_objectives(name, own.objectives) for name, own in counts.classes.items())
    )


def _objectives(name: str, slo: SLO) -> list[tuple[tuple[str, ...], float | None]]:
    return [((name, "ttft"), slo.ttft), ((name, "tbt"), slo.tbt), ((name, "e2e"), slo.e2e)]
