"""The deadlines of a request's tokens, and when its promise is broken for good."""

from __future__ import annotations

from math import ceil, inf

from onbeat.core.request import Request
from onbeat.core.slo import SLOMode
from onbeat.scheduler.replica.request_state import RequestState

TOLERANCE = 1e-9
"""Seconds; as the metrics allow, lest rounding makes a token late."""
LATE_TOKENS_IN = 100
"""One token, or gap, in so many may be late."""
USUAL_OUTPUT_TOKENS = 256
"""Output tokens to plan an e2e objective with where a request allows more and nothing is known of others."""
BEST_EFFORT_RANK = 1e15
"""Queue rank of requests without a TTFT deadline: behind all that have one, by arrival."""


def due_times(request: Request, expected_output_tokens: int | None = None) -> tuple[float, float]:
    """Return when the first token is due and the seconds from each deadline to the next; infinite for none.

    An e2e objective becomes deadlines too: the expected tokens would end in time if the prompt took half of
    it, or more where the TBT objective leaves that.

    Parameters
    ----------
    expected_output_tokens : to spread an e2e objective over; None is `max_tokens`, but not more than a
        usual answer has.
    """
    slo, arrival = request.slo, request.arrival
    if slo is None:
        return inf, inf
    tbt = inf if slo.tbt is None else slo.tbt
    first = inf if slo.ttft is None else arrival + slo.ttft
    if slo.e2e is not None:
        num_tokens = expected_output_tokens or min(request.sampling.max_tokens, USUAL_OUTPUT_TOKENS)
        tbt = min(tbt, slo.e2e / 2 / num_tokens)
        first = min(first, arrival + slo.e2e - tbt * num_tokens)
    return first, tbt


def set_deadlines(state: RequestState, expected_output_tokens: int | None = None) -> None:
    """Give a new request its deadlines."""
    state.ttft_deadline, state.tbt = due_times(state.request, expected_output_tokens)
    state.next_deadline = state.ttft_deadline


class EarliestDeadline:
    """A queue order: by the deadline of the first token; requests without one come last, by arrival."""

    preempts = False

    def rank(self, request: Request) -> float:
        return min(due_times(request)[0], BEST_EFFORT_RANK)


def queue_rank(state: RequestState) -> float:
    """Return the rank in a queue of earliest deadlines, best effort behind all others."""
    return BEST_EFFORT_RANK if state.is_best_effort else min(state.ttft_deadline, BEST_EFFORT_RANK)


def note_delivery(state: RequestState, now: float, mode: SLOMode, num_tokens: int = 1) -> bool:
    """Move on to the next token's deadline after a delivery; return whether this broke the promise.

    `stream` is `D_k = max(arrival + ttft, first token) + k tbt`: a stream that is ahead keeps its slack. In
    `gap` mode each delivery is due `tbt` after the one before, however many tokens it has.
    """
    is_first, late = state.last_delivery == -inf, now > state.next_deadline + TOLERANCE
    state.last_delivery = now
    if state.is_best_effort:
        return False
    num_late = int(late)
    if late and num_tokens > 1 and mode == "stream" and state.tbt > 0:
        # The k-th token of the delivery was due k - 1 objectives later.
        num_late = min(num_tokens, max(1, ceil((now - state.next_deadline - TOLERANCE) / state.tbt)))
    state.num_late_tokens += num_late
    if is_first:
        if late:  # no later token can make up for the first
            give_up(state)
            return True
        due = state.ttft_deadline
        if mode == "stream":
            state.next_deadline = (due if now < due < inf else now) + num_tokens * state.tbt
        else:
            state.next_deadline = now + state.tbt
        return False
    if mode == "stream":
        state.next_deadline += num_tokens * state.tbt
    else:
        state.next_deadline = now + state.tbt
    if late and state.num_late_tokens * LATE_TOKENS_IN > state.max_total_tokens - state.num_prompt_tokens:
        give_up(state)
        return True
    return False


def give_up(state: RequestState) -> None:
    """Serve a request as best effort from now on: nothing can make it keep its promise."""
    state.is_best_effort = True
    state.next_deadline = inf


def is_left_over(state: RequestState) -> bool:
    """Whether a request is served from what is left over: nothing was promised, or the promise is broken."""
    return state.is_best_effort or state.ttft_deadline == state.tbt == inf
