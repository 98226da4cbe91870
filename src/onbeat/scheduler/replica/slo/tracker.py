"""What becomes of the objectives of requests that run, and what that tells of lengths and tenants."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf

from onbeat.core.request import RequestOutput
from onbeat.core.slo import Fate
from onbeat.scheduler.replica.lengths import OutputLengths
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.tenants import TenantCounters

_WORTH_OF_EXCESS = 4.0
"""A tenant that has had a full excess of service over the mean counts so many times less, one that lacks it
so many times more."""

_JUDGED_EVERY = 16
"""Tokens after which a stream's length is judged again: a matter of speed."""


class SLOTracker:
    """Follows requests from arrival to end, and what they tell of lengths and of tenants.

    Attributes
    ----------
    lengths : output lengths of late.
    num_missed : streams so far that could no longer keep their objective once they ran.
    num_ended : requests that have left the batch so far.
    """

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.num_missed = self.num_ended = 0
        self.tenants = TenantCounters()
        self.has_tenants = False
        """Whether there is more than one to be fair between."""

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
            if slo.tbt == slo.next_deadline == inf and slo.last_delivery > -inf:
                slo.last_delivery = now  # no token of it will ever be due, and it had its first one
            else:
                num_tokens = len(output.new_token_ids)
                if slo.end == inf:
                    has_missed = slo.note_delivery(now, num_tokens)
                else:
                    has_missed = self.note_paced(state, num_tokens, (now,))
                self.num_missed += has_missed
                if slo.predicted_ttft is not None:
                    output.predicted_ttft, slo.predicted_ttft = slo.predicted_ttft, None  # told once
            if has_tenants:
                self.tenants.on_output(state.request.tenant, len(output.new_token_ids))
            if slo.is_best_effort:
                output.fate = Fate.RELEGATED

    def tokens_left(self, state: RequestState, num_more: int = 0) -> int:
        """Return how many tokens a request is expected to have still.

        Parameters
        ----------
        num_more : of those that it has, tokens to look away from.
        """
        limit = max(1, state.max_total_tokens - state.num_tokens + num_more)
        return self.lengths.expected(state.request.slo_class, state.num_output_tokens - num_more, limit=limit)

    def note_paced(self, state: RequestState, num_tokens: int, ends: Sequence[float]) -> bool:
        """Move a stream with an e2e objective on, and judge its length by how far it has come."""
        slo, has_missed = state.slo, False
        each = 1 if len(ends) > 1 else num_tokens
        for num_more in range(len(ends) - 1, -1, -1):
            if (state.num_output_tokens - num_more) % _JUDGED_EVERY < each:
                slo.num_left = self.tokens_left(state, num_more) + each
            has_missed |= slo.note_delivery(ends[-1 - num_more], each)
        return has_missed

    def on_finish(self, state: RequestState) -> None:
        """Learn from a request that has all its tokens, unless it might have had but one.

        Those say nothing of answers, and are all that end on a replica that computes prompts for others.
        """
        if state.max_total_tokens - state.num_prompt_tokens > 1:
            self.lengths.observe(state.request.slo_class, state.num_output_tokens)

    def on_drop(self, state: RequestState) -> None:
        """Forget a request, however it ended."""
        if state.has_run:
            self.num_ended += 1
        else:
            self.tenants.on_leave(state.request.tenant)
