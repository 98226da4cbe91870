"""What becomes of the objectives of requests that run, and what that tells of lengths, tenants and paces."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import ceil, exp, inf

from onbeat.core.request import RequestOutput
from onbeat.core.slo import Fate
from onbeat.scheduler.replica.request_state import BEST_EFFORT_RANK, TOLERANCE, RequestState
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.triage import CostModel, Ends

Delivered = list[tuple[RequestState, int, RequestOutput | None]]
"""What a step gave to whom: a request, its new tokens, and the output that tells of them, if one does."""

MIN_SAMPLES = 16
"""Requests that must have been longer before their history is asked."""

MAX_CLASSES = 64
"""Classes with a history of their own; further ones share that of all."""

_MARGIN = 1.5
"""Of the mean of the tokens to come, for how many there should be time."""

_PRIOR_MEAN = 512.0
"""Tokens; with shape 2, half of the answers end within 212 and nine in ten within 1,107."""


class _Lengths:
    """The last lengths of some requests, in their order and ascending."""

    def __init__(self, window: int) -> None:
        self._latest: deque[int] = deque(maxlen=window)
        self.ascending: list[int] = []

    def add(self, length: int) -> None:
        if len(self._latest) == self._latest.maxlen:
            del self.ascending[bisect_left(self.ascending, self._latest[0])]
        self._latest.append(length)
        insort(self.ascending, length)


class OutputLengths:
    """Quantiles of the remaining output tokens, given that a request has come this far.

    The history of a request's class answers where at least 16 of its recent requests were longer than this
    one is so far, else that of all classes, else a prior. Of the n longer ones the k-th smallest is the
    answer, k = ceil(q (n + 1)), at most n: a new one from the same distribution ends by then with probability
    q or more. Lengths that were cut by `max_tokens` are learnt as they were served.

    The prior is a Lomax (Pareto II) distribution of shape 2 and a mean of 512 tokens, about that of answers
    in a chat: the longer one has been at it, the longer it will still take. Its q-quantile of the remaining
    tokens after s is (512 + s) ((1 - q)^(-1/2) - 1).

    Parameters
    ----------
    window : requests remembered, of each class and of all together, at least `MIN_SAMPLES`.

    References
    ----------
    Gong et al., "Past-Future Scheduler for LLM Serving under SLA Guarantees", ASPLOS 2025: lengths sampled
    from recent ones that are longer than the request so far. Here a quantile of them, so that the same
    history gives the same decision.
    """

    __slots__ = ("_all", "_by_class", "_window")

    def __init__(self, window: int = 512) -> None:
        self._window = window
        self._all = _Lengths(window)
        self._by_class: dict[str | None, _Lengths] = {}

    def observe(self, slo_class: str | None, num_output_tokens: int) -> None:
        """Learn how long a request was that has ended by itself or by `max_tokens`.

        Parameters
        ----------
        slo_class : name of its class of objectives; None is a class of its own.
        """
        self._all.add(num_output_tokens)
        history = self._by_class.get(slo_class)
        if history is None and len(self._by_class) < MAX_CLASSES:
            history = self._by_class[slo_class] = _Lengths(self._window)
        if history is not None:
            history.add(num_output_tokens)

    def remaining(self, slo_class: str | None, num_output_tokens_so_far: int, *, q: float, limit: int) -> int:
        """Return the q-quantile of the tokens that a request will still generate.

        Parameters
        ----------
        num_output_tokens_so_far : 0 before the first.
        q : in (0, 1).
        limit : tokens that it may still generate (`max_tokens` and context), at least 1.

        Returns
        -------
        Tokens, in [1, limit].
        """
        if limit <= 1:
            return 1
        so_far = num_output_tokens_so_far
        longer = self._longer(slo_class, so_far)
        if not longer:
            num_left = ceil((_PRIOR_MEAN + so_far) * ((1 - q) ** -0.5 - 1)) or 1
        else:
            num_left = longer[min(ceil(q * (len(longer) + 1)), len(longer)) - 1] - so_far
        return min(num_left, limit)

    def expected(self, slo_class: str | None, so_far: int, *, limit: int) -> int:
        """Return how many tokens a request that has come this far is taken to generate still, to pace it.

        Half as many again as in the mean: it must end in time where it is somewhat longer, too.

        Parameters
        ----------
        limit : see `remaining`.
        """
        longer = self._longer(slo_class, so_far)
        mean = sum(longer) / len(longer) - so_far if longer else _PRIOR_MEAN + so_far
        return max(1, min(ceil(_MARGIN * mean), limit))

    def _longer(self, slo_class: str | None, so_far: int) -> list[int]:
        """Return lengths beyond that of a request so far, ascending; none where too few are known."""
        for history in (self._by_class.get(slo_class), self._all):
            if history is not None:
                first = bisect_right(history.ascending, so_far)
                if len(history.ascending) - first >= MIN_SAMPLES:
                    return history.ascending[first:]
        return []


INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Service in a prompt token that was computed (not found in the prefix cache), and in an output token."""
FULL_EXCESS = 8192.0
"""Weighted tokens that count as an excess of 1."""
MOST_IDLE_TENANTS = 4096
"""Remembered beside those that wait; of one that is forgotten the excess is forgiven."""
_WORTH_OF_EXCESS = 4.0
"""A tenant that has had a full excess of service over the mean counts so many times less, one that lacks it
so many times more."""

_JUDGED_EVERY = 16
"""Tokens after which a stream's length is judged again: a matter of speed."""


class TenantCounters:
    """Weighted tokens served to each tenant; the backlogged one with the least is served next.

    A tenant is *backlogged* while requests of it wait: from `on_arrival` to the `on_leave` of each, when it
    is first run, or gives up. One that comes back is lifted to the least counter of the backlogged ones (to
    that of the last one to leave where there is none), so that no tenant saves up service while away. If the
    least counter is always served, the service of any two tenants differs by at most 2 U over any time in
    which both are backlogged, U = max(w_in * longest prompt, w_out * tokens in the KV cache), and the server
    never idles while anybody waits. An unknown tenant stands at the level to which the last one was lifted.

    References
    ----------
    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, section 4.
    """

    __slots__ = ("_backlogged_sum", "_counters", "_last_to_leave", "_level", "_num_waiting", "are_several")

    def __init__(self) -> None:
        self._counters: dict[str | None, float] = {}
        self._num_waiting: dict[str | None, int] = {}
        """Requests of each backlogged tenant."""
        self._backlogged_sum = self._level = 0.0
        self._last_to_leave: str | None = None
        self.are_several = False
        """Whether there is more than one to be fair between."""

    def on_arrival(self, tenant: str | None) -> None:
        """Hear that a request of the tenant begins to wait."""
        waiting, counters = self._num_waiting, self._counters
        if tenant not in waiting:
            if waiting:
                self._level = min([counters[each] for each in waiting])
            else:
                self._level = max(self._level, self.counter(self._last_to_leave))
            counters[tenant] = max(self.counter(tenant), self._level)
            self._backlogged_sum += counters[tenant]
        waiting[tenant] = waiting.get(tenant, 0) + 1
        if len(counters) - len(waiting) > MOST_IDLE_TENANTS:
            self._counters = {each: counters[each] for each in waiting}
        self.are_several = len(self._counters) > 1

    def on_leave(self, tenant: str | None, num_tokens: int = 0) -> None:
        """Hear that a request of the tenant waits no more; charge it for what it computes of its prompt."""
        self._num_waiting[tenant] -= 1
        if not self._num_waiting[tenant]:
            self._last_to_leave = tenant
            del self._num_waiting[tenant]
            # Sums of floats do not come back to 0 by themselves.
            self._backlogged_sum = self._backlogged_sum - self._counters[tenant] if self._num_waiting else 0.0
        if num_tokens:
            self.charge(tenant, INPUT_WEIGHT * num_tokens)

    def counter(self, tenant: str | None) -> float:
        """Return the weighted tokens that stand against the tenant."""
        return self._counters.get(tenant, self._level)

    def share(self, tenant: str | None) -> float:
        """Return how far the tenant is ahead of the mean of the backlogged ones, in [-1, 1].

        1 is `FULL_EXCESS` weighted tokens more than the mean, or beyond; 0 for the only backlogged one.
        """
        num_backlogged = len(self._num_waiting)
        if num_backlogged <= (tenant in self._num_waiting):
            return 0.0
        excess = self.counter(tenant) - self._backlogged_sum / num_backlogged
        return max(-1.0, min(1.0, excess / FULL_EXCESS))

    def charge(self, tenant: str | None, service: float) -> None:
        """Charge weighted tokens: `INPUT_WEIGHT` for each of a prompt that is computed, `OUTPUT_WEIGHT`."""
        self._counters[tenant] = self._counters.get(tenant, self._level) + service
        if tenant in self._num_waiting:
            self._backlogged_sum += service


_PACE_SECONDS = 30.0
"""Time constant of the pace of prompts."""
_PRIOR_SECONDS = 0.1
"""What "prompts get all the time" weighs before anything was seen."""
_SLOWEST = 1 / 100
"""The pace that best effort is taken to have at least: else its wait would be infinite."""


class _Pace:
    """Seconds of prefill work that are begun in a second in which some waits, exponentially weighted.

    While none waits it returns to "all the time": what held prompts up then is over, for all that is known.
    """

    def __init__(self) -> None:
        self._begun = self._watched = _PRIOR_SECONDS
        self._last = 0.0
        """Until when it has counted, seconds."""
        self.some_wait = False
        """Whether prompts have waited since then."""

    def count(self, now: float, begun: float, *, some_wait: bool) -> None:
        """Count the time until now, and the work begun at its end, seconds; whether some wait from now on."""
        seconds = max(0.0, now - self._last)
        self._last = max(now, self._last)
        decay = exp(-seconds / _PACE_SECONDS)
        forgotten = (1 - decay) * _PRIOR_SECONDS
        self._begun = self._begun * decay + (begun if self.some_wait else forgotten)
        self._watched = self._watched * decay + (seconds if self.some_wait else forgotten)
        self.some_wait = some_wait

    @property
    def rate(self) -> float:
        return max(self._begun / self._watched, _SLOWEST)


class SLOTracker:
    """Follows requests from arrival to end, and what they tell of lengths, of tenants and of paces.

    Attributes
    ----------
    lengths : output lengths of late.
    begun, best_effort_begun : at which pace prompts that waited were begun of late, and best effort of them.
    num_missed : streams so far that could no longer keep their objective once they ran.
    num_ended : requests that have left the batch so far.
    """

    def __init__(self) -> None:
        self.lengths = OutputLengths()
        self.num_missed = self.num_ended = 0
        self.tenants = TenantCounters()
        self.begun, self.best_effort_begun = _Pace(), _Pace()
        self._ends, self._num_known, self._num_running = Ends(), 0, 0
        self._last_change = 0.0
        """When a plan last found another number of them, seconds."""

    def worth(self, state: RequestState) -> float:
        """Return what keeping an objective is worth: its weight, less for tenants that have had more."""
        weight = state.request.weight
        if self.tenants.are_several:
            weight *= _WORTH_OF_EXCESS ** -self.tenants.share(state.request.tenant)
        return weight

    def on_plan(self, plan: StepPlan, cost_model: CostModel) -> None:
        """Learn from a plan that is carried out; the queue still holds those that it admits."""
        begun = begun_best_effort = 0.0
        num_best_effort = plan.waiting.best_effort.num_requests
        for admission in plan.admissions:
            seconds = cost_model.of_sums(*admission.state.queued_work)
            begun += seconds
            if admission.state.sort_key[0] >= BEST_EFFORT_RANK:
                begun_best_effort += seconds
                num_best_effort -= 1
        self.begun.count(plan.now, begun, some_wait=plan.waiting.length > len(plan.admissions))
        self.best_effort_begun.count(plan.now, begun_best_effort, some_wait=num_best_effort > 0)
        now, num_ended, num_running = plan.now, self.num_ended, plan.num_running
        if (num_ended, num_running) != (self._num_known, self._num_running):
            # Else it is the same whether each step between was planned or not.
            self._ends.count(now - self._last_change, self._num_running, num_ended - self._num_known)
            self._num_known, self._num_running, self._last_change = num_ended, num_running, now

    def ends_by(self, now: float) -> Ends:
        """Return the pace at which requests ended of late, with the time since the last of them."""
        ends = replace(self._ends)
        ends.count(now - self._last_change, self._num_running, 0)
        return ends

    def on_deliveries(self, delivered: Delivered, now: float, streams: Sequence[RequestState] = ()) -> None:
        """Count what a step delivered, and tell the callers what has become of their objectives.

        Parameters
        ----------
        now : when the step ended, seconds.
        streams : had one more token each, which was not their first, and hear of it elsewhere.
        """
        if self.tenants.are_several:
            for state, num_tokens, _ in [*delivered, *[(state, 1, None) for state in streams]]:
                self.tenants.charge(state.request.tenant, OUTPUT_WEIGHT * num_tokens)
        others: Delivered = []
        for state in streams:
            slo = state.slo
            due = slo.next_deadline
            if slo.is_regular and now <= due + TOLERANCE:
                slo.last_delivery = now
                slo.next_deadline = slo.objective_deadline = due + slo.tbt
            elif due == inf:  # no token of it will ever be due
                slo.last_delivery = now
            else:
                others.append((state, 1, None))
        for state, num_tokens, output in [*others, *delivered]:
            slo = state.slo
            if slo.next_deadline == inf and slo.last_delivery > -inf:
                slo.last_delivery = now  # no token of it will ever be due, and it had its first one
            elif slo.end < inf:
                self.num_missed += self.note_paced(state, num_tokens, (now,))
            else:
                self.num_missed += slo.note_delivery(now, num_tokens)
            if output is not None:
                output.predicted_ttft, slo.predicted_ttft = slo.predicted_ttft, None  # told once
                output.fate = Fate.RELEGATED if slo.is_best_effort else None

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
        if state.admitted_step_id >= 0:
            self.num_ended += 1
        else:
            self.tenants.on_leave(state.request.tenant)
