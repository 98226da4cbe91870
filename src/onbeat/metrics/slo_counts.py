"""Count kept and missed objectives by class, since the start and of late.

A class is a name from the server's list, so that the number of time series stays small; requests with
objectives of their own and no class are counted as `unnamed`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from onbeat.core.slo import SLO, Fate, SLOMode
from onbeat.metrics.attainment import good_requests, has_objectives
from onbeat.metrics.breakdown import OUTCOME, Outcomes, by_prompt_decile, has_ttft, wait_of, worst_decile
from onbeat.metrics.declare import counter, gauge, histogram, shown, shown_parts
from onbeat.metrics.histogram import TBT_SECONDS, TTFT_SECONDS, Histogram
from onbeat.metrics.record import RequestRecord

UNNAMED = "unnamed"
OUTCOMES = (Fate.IN_TIME, Fate.MISSED, Fate.REJECTED, Fate.EXPIRED, Fate.ABANDONED)
"""What became of a request. `EXPIRED` are the overdue ones, too; the abandoned ones are not judged."""
WINDOW_SECONDS = 60.0
"""What "of late" is."""
MOST_RECENT = 2**13
"""Requests of a class of late that are looked at one by one, the last ones."""
JUDGED_DELIVERIES = 2**15
"""What is judged at a time: some milliseconds of work."""
JUDGED_REQUESTS = 64
"""Ended requests that wait to be judged. Together they take little longer than each would alone."""


class EndedRequest(NamedTuple):
    """What is remembered of a judged request."""

    end: float
    prompt_tokens: int
    wait: float
    """Seconds, as `breakdown` defines it."""
    is_ttft: bool
    is_good: bool


@dataclass(slots=True)
class ClassCounts:
    """The requests of one class."""

    objectives: SLO = field(default_factory=SLO)
    """Those of its latest request."""
    outcomes: Counter[Fate] = counter(
        "slo_requests_total", "ended requests, by what became of them", "outcome", known=OUTCOMES
    )
    ttft: Histogram = histogram(
        "slo_time_to_first_token_seconds", "TTFT, of requests with objectives alone", TTFT_SECONDS
    )
    gap: Histogram = histogram("slo_time_between_tokens_seconds", "TBT, the same", TBT_SECONDS)
    _recent: deque[EndedRequest] = field(default_factory=deque)
    """The judged requests of late, by end."""

    @property
    def num_judged(self) -> int:
        """Requests that were judged since the start."""
        return sum(self.outcomes.values()) - self.outcomes[Fate.ABANDONED]

    def last(self, count: int) -> list[EndedRequest]:
        """Return the requests that were judged last, those of them that are remembered."""
        return list(islice(self._recent, max(len(self._recent) - count, 0), None))

    def remember(self, ended: Sequence[EndedRequest]) -> None:
        """Take requests of late that were judged and counted elsewhere."""
        self._recent = deque(sorted([*self._recent, *ended]))
        self._forget(max((each.end for each in ended), default=0.0))

    @shown("slo_objective_seconds", "objective")
    def objective_seconds(self) -> Mapping[str, float | None]:
        """`ttft`, `tbt` or `e2e` of the latest request of the class, where it has one."""
        return {name: getattr(self.objectives, name) for name in ("ttft", "tbt", "e2e")}

    def take(self, record: RequestRecord, outcome: Fate) -> None:
        """Count a request that ended."""
        self.outcomes[outcome] += 1
        if outcome is not Fate.ABANDONED:
            self._recent.append(
                EndedRequest(
                    end=record.end,
                    prompt_tokens=record.offered_prompt_tokens,
                    wait=wait_of(record),
                    is_ttft=has_ttft(record),
                    is_good=outcome is Fate.IN_TIME,
                )
            )
            self._forget(record.end)

    def recent(self, now: float) -> list[EndedRequest]:
        """Return the judged requests that have ended of late, the last `MOST_RECENT`."""
        self._forget(now)
        return list(islice(self._recent, max(len(self._recent) - MOST_RECENT, 0), None))

    def judged_and_good(self, now: float) -> tuple[int, int]:
        """Return how many requests of late were judged, and how many of them were good."""
        self._forget(now)
        return len(self._recent), sum(each.is_good for each in self._recent)

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
        self._classes: dict[str, ClassCounts] = {}
        self._ended: deque[RequestRecord] = deque()
        """Requests that wait to be judged."""

    @shown_parts(ClassCounts, "slo_class")
    def classes(self) -> dict[str, ClassCounts]:
        """Counts by class, with all requests that have ended."""
        while self._ended:
            self.judge()
        return self._classes

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
        """Take a request that is to be judged."""
        if has_objectives(record):
            self._ended.append(record)
            if len(self._ended) >= JUDGED_REQUESTS:
                self.judge()

    def judge(self) -> None:
        """Judge some requests that have ended, those that wait for it longest."""
        if not self._ended:
            return
        records: list[RequestRecord] = []
        num_deliveries = 0
        while self._ended and num_deliveries < JUDGED_DELIVERIES:
            records.append(self._ended.popleft())
            num_deliveries += len(records[-1].delivery_times)
        # One that was aborted is judged as far as it came: a caller who has waited too long for a token was
        # not served in time.
        as_if_whole = [
            replace(record, finish_reason="stop") if record.finish_reason == "abort" else record
            for record in records
        ]
        for record, is_good in zip(records, good_requests(as_if_whole, mode=self.mode).tolist(), strict=True):
            self._class(record).take(record, _outcome(record, is_good=is_good))

    def remember(self, request_class: str, ended: Sequence[EndedRequest]) -> None:
        """Take requests of late that were judged and counted elsewhere."""
        self._classes.setdefault(request_class, ClassCounts()).remember(ended)

    def take_new(self, told: dict[str, int]) -> dict[str, list[EndedRequest]]:
        """Return the requests that were judged since the last time, by class.

        Parameters
        ----------
        told : number of those of each class that were returned so far; written.
        """
        found = {}
        for name, own in self.classes.items():
            if new := own.num_judged - told.get(name, 0):
                found[name], told[name] = own.last(new), own.num_judged
        return found

    def recent(self, now: float) -> Outcomes:
        """Return the judged requests of all classes that have ended of late, by class and end."""
        ended = list(chain.from_iterable(own.recent(now) for own in self.classes.values()))
        return np.array([each[1:] for each in ended], dtype=OUTCOME)

    def _class(self, record: RequestRecord) -> ClassCounts:
        name = record.request_class or UNNAMED
        if name not in self._classes:
            self._classes[name] = ClassCounts()
        return self._classes[name]


def _outcome(record: RequestRecord, *, is_good: bool) -> Fate:
    if record.fate is Fate.REJECTED:
        return Fate.REJECTED
    if record.fate in (Fate.EXPIRED, Fate.OVERDUE):
        return Fate.EXPIRED
    if not is_good:
        return Fate.MISSED
    return Fate.ABANDONED if record.finish_reason == "abort" else Fate.IN_TIME


@dataclass(frozen=True, slots=True)
class RecentObjectives:
    """How objectives were kept in the last minute."""

    attainment: Mapping[str, float | None] = gauge(
        "slo_attainment",
        "good / (good + bad + rejected + expired) of the requests ended in the last 60 s",
        "slo_class",
    )
    goodput: Mapping[str, float | None] = gauge(
        "goodput_requests_per_second", "good requests of the last 60 s, per second", "slo_class"
    )
    longest_wait: float | None = gauge(
        "slo_longest_wait_seconds", "longest wait of all requests that ended in the last 60 s"
    )
    worst: float | None = gauge(
        "slo_attainment_worst_decile", "attainment of the decile of prompt lengths where it is least"
    )
    worst_prompts: Mapping[str, int] = gauge(
        "slo_worst_decile_prompt_tokens", "shortest and longest prompt of that decile", "bound"
    )

    @classmethod
    def of(cls, counts: SLOCounts, now: float, *, uptime: float) -> RecentObjectives:
        """Return how they were kept.

        Parameters
        ----------
        now : seconds, on the clock of steps and requests.
        uptime : seconds that have been counted.
        """
        window = min(uptime, WINDOW_SECONDS)
        recent = {name: own.judged_and_good(now) for name, own in counts.classes.items()}
        outcomes = counts.recent(now)
        worst = worst_decile(by_prompt_decile(outcomes))
        return cls(
            {name: good / judged if judged else None for name, (judged, good) in recent.items()},
            {name: good / window if window > 0 else None for name, (_, good) in recent.items()},
            longest_wait=float(outcomes["wait"].max()) if outcomes.size else None,
            worst=worst.attainment if worst else None,
            worst_prompts={"min": worst.min_prompt_tokens, "max": worst.max_prompt_tokens} if worst else {},
        )
