"""The requests of a replica as the planner of a step sees them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from math import inf
from operator import itemgetter

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.step_plan import StepPlan
from onbeat.scheduler.triage import DueWork

MOST_JOBS = 128
"""Waiting prompts with deadlines that a plan looks at, those that are due first: a plan takes the same time
however many wait behind them."""
PromptJob = DueWork[RequestState]
"""A prompt that runs or waits on a replica."""
_DEADLINE = itemgetter(0)
"""Of a job, without a call."""


class RunningView:
    """Running requests by what they want: one token each, or tokens of a prompt.

    Parameters
    ----------
    running : all of them.
    start : when the step to plan starts, seconds.
    shortest : of a step with a token, seconds. A TBT objective below it no step can keep, whatever is left
        out of it, so that it binds none: others would wait for nothing.

    Attributes
    ----------
    streams : requests that want one token and have a deadline for it.
    deadlines : that deadline of each stream.
    best_effort_decodes : requests that want one token and have none: no objective, one that was missed, or
        one that cannot be kept.
    prefills : requests in the middle of their prompt.
    deadline : the earliest of `streams` with a TBT objective, even a passed one; infinite without any.
    urgent : the stream that is due first, by its pace or its objective.
    tightest : the shortest TBT objective of `streams` that a step can keep; infinite without any.
    paces : the times between tokens that e2e objectives ask for, and TBT objectives do not.
    """

    def __init__(self, running: Iterable[RequestState], start: float, shortest: float) -> None:
        self.streams: list[RequestState] = []
        self.deadlines: list[float] = []
        self.best_effort_decodes: list[RequestState] = []
        self.prefills: list[RequestState] = []
        self.deadline = self.tightest = inf
        self.paces: list[float] = []
        self.urgent: RequestState | None = None
        self._look(running, start, shortest)

    @property
    def decodes(self) -> list[RequestState]:
        """Requests that want one token."""
        return [*self.streams, *self.best_effort_decodes]

    @property
    def has_lost_job(self) -> bool:
        """Whether a stream runs that has missed its e2e objective, and that another request goes on from."""
        lost = (state for state in self.best_effort_decodes if state.slo.is_best_effort)
        return any(state.slo.end < inf and state.request.kept_for > 0 for state in lost)

    def decode_shape(self, others: Sequence[RequestState] = ()) -> BatchShape:
        """Return the shape of a step with one token for each that wants one, and for others."""
        return decode_shape([*self.streams, *self.best_effort_decodes, *others])

    def _look(self, running: Iterable[RequestState], start: float, shortest: float) -> None:
        streams, best_effort_decodes = self.streams, self.best_effort_decodes
        earliest, tightest = self.deadline, self.tightest
        deadlines, paces, first = self.deadlines, self.paces, inf
        for state in running:
            num_in_flight = state.num_in_flight_tokens
            num_tokens = state.num_tokens + num_in_flight
            is_full = num_in_flight and num_tokens >= state.max_total_tokens
            if is_full or num_tokens >= state.pause_at or state.is_in_flight or state.sits_out:
                continue  # full with what is in flight, paused, held, or not its turn
            wanted = num_tokens - state.num_computed_tokens
            if wanted != 1:
                if wanted > 1:
                    self.prefills.append(state)
                continue
            slo = state.slo
            deadline = slo.next_deadline
            if num_in_flight:
                deadline = slo.deadline_after(state.num_certain_tokens, start)
            objective = slo.tbt_objective
            if deadline == inf or (objective < shortest and slo.tbt == objective):
                best_effort_decodes.append(state)
                continue
            streams.append(state)
            deadlines.append(deadline)
            if deadline < first:
                first, self.urgent = deadline, state
            earliest = min(earliest, deadline) if objective < inf else earliest
            if slo.tbt < objective:
                paces.append(slo.tbt)
            if shortest <= objective < tightest:
                tightest = objective
        self.deadline, self.tightest = earliest, tightest


def decode_shape(states: Collection[RequestState]) -> BatchShape:
    """Return the shape of a step with one token for each."""
    context, guided = len(states), 0
    for state in states:
        context += state.num_computed_tokens
        guided += state.is_guided
    shape = BatchShape.of_decodes(len(states), context)
    shape.num_guided_rows = guided
    return shape


def prefill_jobs(
    plan: StepPlan, now: float, prefills: Sequence[RequestState], cost_model: CostModel
) -> tuple[list[PromptJob], list[RequestState]]:
    """Return the prompts with deadlines in their order, and those that cannot be in time any more.

    A prompt is late for certain once not even an idle machine would be in time, which counts what others have
    left in the prefix cache since it arrived. One that is protected is not given up.

    Parameters
    ----------
    plan : knows who waits, and what the prefix cache holds; it remembers what was found.
    now : when the step to plan starts, seconds.
    prefills : running requests in the middle of their prompts.
    """
    waiting = plan.waiting
    jobs: list[PromptJob] = []
    late: list[RequestState] = []
    if not (prefills or len(waiting)):
        return jobs, late
    token, pair = cost_model.costs.token, cost_model.costs.pair
    earliest = now + cost_model.costs.step
    started = [state for state in prefills if state.slo.next_deadline < inf]
    for state in (*started, *waiting.first_below(BEST_EFFORT_RANK, MOST_JOBS)):
        num_cached = state.num_computed_tokens or state.num_hit_tokens
        num_tokens = state.num_tokens + state.num_in_flight_tokens - num_cached
        seconds = num_tokens * (token + pair * (num_cached + 0.5 * num_tokens))
        deadline = state.slo.next_deadline
        if earliest + seconds > deadline and not state.is_protected:
            num_found = 0 if state.block_ids else len(plan.kv.match(state)) * plan.kv.block_size
            if num_found > num_cached:
                plan.num_hit_tokens[state.request_id] = num_found
                seconds = cost_model.seconds(state.num_tokens - num_found, num_found)
            if num_found <= num_cached or earliest + seconds > deadline:
                late.append(state)
                continue
        jobs.append(DueWork(deadline, seconds, state))
    # A stream that was preempted with a token in flight stands in the queue by the deadline of that.
    jobs.sort(key=_DEADLINE)
    return jobs, late
