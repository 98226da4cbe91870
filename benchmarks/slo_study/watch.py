"""Ends a run as soon as its share is lost for certain."""

from __future__ import annotations

from collections import deque
from math import floor

import numpy as np
from numpy.typing import NDArray

from onbeat.core.slo import SLOMode
from onbeat.core.step import StepStats
from onbeat.metrics.attainment import TOLERANCE, good_requests
from onbeat.metrics.record import RequestRecord

_BATCH = 16


class Lost(Exception):
    """So many requests are not good that the share cannot be kept."""

    def __init__(self, at_most: float) -> None:
        super().__init__(f"at most {at_most:.4f} are good")
        self.at_most = at_most


class LossWatch:
    """An observer that counts requests that are not good, the soonest that this is known.

    A first token that is late counts when its deadline passes; all else when the request ends.

    Parameters
    ----------
    share : of the requests that are not hopeless, which must be good.
    hopeless : of each row of the load; these count neither way.
    """

    wants_every_step = False

    def __init__(self, share: float, mode: SLOMode, hopeless: NDArray[np.bool_]) -> None:
        self._mode = mode
        self._hopeless = hopeless
        self._num_counted = int((~hopeless).sum())
        self._allowed = floor(self._num_counted * (1 - share) + 1e-9)
        self._bad: set[str] = set()
        self._unstarted: dict[float, deque[RequestRecord]] = {}
        """ttft -> requests in order of arrival, and so of their deadlines"""
        self._ended: list[RequestRecord] = []

    def on_request(self, record: RequestRecord, /) -> None:
        if self._hopeless[int(record.request_id)]:
            return
        if record.slo is not None and record.slo.ttft is not None:
            self._unstarted.setdefault(record.slo.ttft, deque()).append(record)

    def on_step(self, replica: int, stats: StepStats, /) -> None:  # noqa: ARG002
        for ttft, records in self._unstarted.items():
            while records and records[0].arrival + ttft + TOLERANCE < stats.end:
                record = records.popleft()
                if record.ttft is None or record.ttft > ttft + TOLERANCE:
                    self._count(record)

    def on_finish(self, record: RequestRecord, /) -> None:
        if self._hopeless[int(record.request_id)]:
            return
        self._ended.append(record)
        if len(self._ended) < _BATCH:
            return
        good = good_requests(self._ended, mode=self._mode)
        for ended in (each for each, is_good in zip(self._ended, good.tolist(), strict=True) if not is_good):
            self._count(ended)
        self._ended = []

    def _count(self, record: RequestRecord) -> None:
        self._bad.add(record.request_id)
        if len(self._bad) > self._allowed:
            raise Lost(1 - len(self._bad) / self._num_counted)
