"""What became of requests and tenants so far: the memory of a policy that keeps deadlines."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from onbeat.core.request import RequestOutput
from onbeat.core.step import SchedulerState
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.fairness import TenantCounters
from onbeat.scheduler.replica.slo.lengths import OutputLengths
from onbeat.scheduler.replica.slo.load_estimate import LoadEstimate

_WORTH_OF_EXCESS = 4.0
"""A tenant that has had a full excess of service over the mean counts so many times less, one that lacks it
so many times more."""


class SLOTracker:
    """Follows requests from arrival to end, and what they tell of the load, of lengths and of tenants.

    Attributes
    ----------
    lengths : output lengths of late.
    load : arrivals and the work that they bring.
    num_missed : streams so far that could no longer keep their objective once they ran.
    num_rejected : reason -> requests rejected on arrival or ended in the queue.
    predicted_wait : seconds until a prompt that had arrived with the last step would have been begun.
    tenants : what each has had.
    has_tenants : whether there is more than one to be fair between.
    """

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.load = LoadEstimate()
        self.num_missed = 0
        self.num_rejected: dict[str, int] = {}
        self.predicted_wait = 0.0
        self.tenants = TenantCounters()
        self.has_tenants = False

    def worth(self, state: RequestState) -> float:
        """Return what keeping an objective is worth: its weight, less for tenants that have had more."""
        weight = state.request.weight
        if self.has_tenants:
            weight *= _WORTH_OF_EXCESS ** -self.tenants.share(state.request.tenant)
        return weight

    def on_arrival(self, state: RequestState) -> None:
        """Count a request that waits."""
        self.tenants.on_arrival(state.request.tenant)
        self.has_tenants = len(self.tenants) > 1

    def on_start(self, state: RequestState) -> None:
        """Count a request that runs for the first time, and its prompt."""
        self.tenants.on_leave(state.request.tenant)
        self.tenants.on_prefill(state.request.tenant, state.num_tokens - state.num_cached_tokens)

    def on_adopt(self, state: RequestState) -> None:
        """Count a request that comes from another replica, which has charged its prompt."""
        self.on_arrival(state)
        self.tenants.on_leave(state.request.tenant)

    def on_deliveries(
        self,
        delivered: Iterable[tuple[RequestState, RequestOutput]],
        now: float,
    ) -> None:
        """Count what a step delivered, and tell the callers what has become of their objectives.

        Parameters
        ----------
        now : when the step ended, seconds.
        """
        has_tenants = self.has_tenants
        for state, output in delivered:
            slo = state.slo
            if slo.tbt == slo.next_deadline == inf and slo.last_delivery > -inf and not has_tenants:
                slo.last_delivery = now  # no token of it will ever be due, and it had its first one
            else:
                self._on_delivery(state, output, now)
            output.is_relegated = slo.is_best_effort

    def _on_delivery(self, state: RequestState, output: RequestOutput, now: float) -> None:
        slo, num_tokens = state.slo, len(output.new_token_ids)
        if slo.note_delivery(now, num_tokens):
            self.num_missed += 1
        if self.has_tenants:
            self.tenants.on_output(state.request.tenant, num_tokens)
        if slo.predicted_ttft is not None:
            output.predicted_ttft = slo.take_prediction()

    def on_finish(self, state: RequestState) -> None:
        """Learn from a request that has all its tokens, unless it might have had but one.

        Those say nothing of answers, and are all that end on a replica that computes prompts for others.
        """
        if state.max_total_tokens - state.num_prompt_tokens > 1:
            self.lengths.observe(state.request.slo_class, state.num_output_tokens)

    def on_drop(self, state: RequestState) -> None:
        """Forget a request, however it ended."""
        if not state.has_run:
            self.tenants.on_leave(state.request.tenant)

    def reject(self, reason: str) -> None:
        """Count a request that is not served."""
        self.num_rejected[reason] = self.num_rejected.get(reason, 0) + 1

    def report(
        self,
        now: float,
        *,
        num_best_effort: int,
        num_relegated: int,
        queue_seconds: float,
        slacks: list[float],
    ) -> SchedulerState:
        """Return how things stand."""
        return SchedulerState(
            num_best_effort=num_best_effort,
            num_relegated=num_relegated,
            num_missed=self.num_missed,
            num_rejected=dict(self.num_rejected),
            predicted_wait=self.predicted_wait,
            arrival_rate=self.load.arrival_rate(now),
            utilisation=self.load.utilisation(now),
            decode_slacks=slacks,
            queue_seconds=queue_seconds,
        )
