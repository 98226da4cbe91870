"""What was promised to whom, and how it stands: the memory of a policy that keeps deadlines."""

from __future__ import annotations

from collections import deque
from math import inf

from onbeat.core.slo import SLOMode
from onbeat.core.step import SchedulerState
from onbeat.scheduler.replica.fairness import TenantCounters
from onbeat.scheduler.replica.lengths import OutputLengths
from onbeat.scheduler.replica.load_estimate import LoadEstimate
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import note_delivery
from onbeat.scheduler.replica.slo.triage import Worth

_RATIOS = 64
_FEWEST_RATIOS = 8
_RATIO_QUANTILE = 0.9
_MOST_SURCHARGE = 1.5
_ARRIVALS = 64
"""Of so many arrivals is the shortest TTFT objective."""


class PromiseBook(Worth):
    """Follows requests from arrival to end, and what they tell of the load, of lengths and of tenants.

    Attributes
    ----------
    lengths : output lengths of late.
    load : arrivals and the prefill work that they bring.
    num_lost : streams so far that could no longer keep their promise once they ran.
    num_rejected : reason -> requests refused or given up.
    has_tenants : whether there is more than one to be fair between.
    predicted_wait : seconds until a prompt that had arrived with the last step would have been begun.
    """

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.load = LoadEstimate()
        self.num_lost = 0
        self.num_rejected: dict[str, int] = {}
        self.predicted_wait = 0.0
        self.has_tenants = False
        self._tenants = TenantCounters()
        self._ttft_ratios: deque[float] = deque(maxlen=_RATIOS)
        self._ttfts: deque[float] = deque(maxlen=_ARRIVALS)

    def of(self, state: RequestState) -> float:
        """Return what keeping a promise is worth (`triage.Worth`).

        A tenant that has had a full excess more than the mean counts a quarter, one that lacks it fourfold.
        """
        weight = state.request.weight
        return weight * 4.0 ** -self._tenants.share(state.request.tenant) if self.has_tenants else weight

    def on_arrival(self, state: RequestState) -> None:
        """Count a request that waits."""
        self._ttfts.append(state.ttft_deadline - state.request.arrival)
        self._tenants.on_arrival(state.request.tenant)
        self.has_tenants = len(self._tenants) > 1

    @property
    def shortest_ttft(self) -> float:
        """The shortest TTFT objective of the requests that came of late, seconds; infinite without any."""
        return min(self._ttfts, default=inf)

    def ttft_surcharge(self) -> float:
        """Return by what factor first tokens come later than predicted, at worst of late, in [1, 1.5].

        The 90 % quantile of measured / predicted over the last requests that were served in their turn.
        """
        ratios = sorted(self._ttft_ratios)
        if len(ratios) < _FEWEST_RATIOS:
            return 1.0
        return min(max(1.0, ratios[int(_RATIO_QUANTILE * len(ratios))]), _MOST_SURCHARGE)

    def on_start(self, state: RequestState) -> None:
        """Count a request that runs for the first time, and its prompt."""
        self._tenants.on_leave(state.request.tenant)
        self._tenants.on_prefill(state.request.tenant, state.num_tokens - state.num_cached_tokens)

    def on_delivery(self, state: RequestState, num_tokens: int, now: float, mode: SLOMode) -> None:
        """Count a delivery."""
        if state.predicted_ttft and not state.is_best_effort:
            self._ttft_ratios.append((now - state.request.arrival) / state.predicted_ttft)
        self.num_lost += note_delivery(state, now, mode, num_tokens)
        if self.has_tenants:
            self._tenants.on_output(state.request.tenant, num_tokens)

    def on_finish(self, state: RequestState) -> None:
        """Learn from a request that has all its tokens."""
        self.lengths.observe(state.request.slo_class, state.num_output_tokens)

    def on_drop(self, state: RequestState) -> None:
        """Forget a request, however it ended."""
        if state.scheduled_time < 0:
            self._tenants.on_leave(state.request.tenant)

    def reject(self, reason: str) -> None:
        """Count a request that is not served."""
        self.num_rejected[reason] = self.num_rejected.get(reason, 0) + 1

    def report(
        self, now: float, *, num_best_effort: int, num_relegated: int, slacks: list[float]
    ) -> SchedulerState:
        """Return how things stand."""
        return SchedulerState(
            num_best_effort=num_best_effort,
            num_relegated=num_relegated,
            num_lost=self.num_lost,
            num_rejected=dict(self.num_rejected),
            predicted_wait=self.predicted_wait,
            arrival_rate=self.load.arrival_rate(now),
            utilisation=self.load.utilisation(now),
            decode_slacks=slacks,
        )
