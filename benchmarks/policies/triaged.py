"""Simple rules to compare `slo` with: token budgets and time budgets, with triage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf
from operator import add

from onbeat.core.slo import ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import Composition
from onbeat.scheduler.replica.request_state import RequestState, first_deadline
from onbeat.scheduler.replica.slo.view import PromptJob, StepFiller, decode_shape, prefill_jobs
from onbeat.scheduler.replica.step_plan import Composer, StepPlan, needs_block
from onbeat.scheduler.triage import LEAST_SHARE, CostModel, select_feasible

NUM_TRIED = 8
"""Lengths of the first of two chunks that are tried, up to the longest."""


def split_running(running: Iterable[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
    """Return the requests that may run now: those that want one token, and those with more of a prompt."""
    decodes: list[RequestState] = []
    prefills: list[RequestState] = []
    for state in running:
        is_full = state.num_tokens + state.num_in_flight_tokens >= state.max_total_tokens
        if state.is_in_flight or state.sits_out or is_full or state.is_paused:
            continue
        num_wanted = state.num_wanted_tokens
        if num_wanted == 1:
            decodes.append(state)
        elif num_wanted > 1:
            prefills.append(state)
    return decodes, prefills


def decode(plan: StepPlan, states: list[RequestState], victims: list[RequestState]) -> None:
    """Give each request one token as far as rows, tokens and blocks reach.

    Parameters
    ----------
    states : who wants a token, first served first.
    victims : who may be preempted where blocks run out, the last one first; one of them always stays.
    """
    kept = states[: max(0, min(plan.num_rows_left, plan.num_tokens_left))]
    candidates = [state for state in victims if not state.is_in_flight]
    while len(candidates) > 1 and plan.num_growing(kept) > plan.num_blocks_left:
        plan.ran_out_of_blocks = True
        victim = candidates.pop()
        plan.preempt(victim)
        kept = [state for state in kept if state is not victim]
    before = len(plan.decodes)
    plan.decodes += [state for state in kept if not needs_block(state) or plan.take_block()]
    plan.num_tokens_left -= len(plan.decodes) - before


class TriagedBudget(Composer):
    """All decodes, then prompts within a budget, those last that cannot all be in time.

    Parameters
    ----------
    model : predicts steps.
    by_time : the budget is the tightest TBT objective of the streams, and an efficient chunk (the *simple
        rule*); else it is the step's tokens, `max_num_batched_tokens`, as in Sarathi-Serve.
    by_deadline : prompts that are served go by deadline; else by arrival.
    """

    def __init__(self, model: StepTimeModel, *, by_time: bool, by_deadline: bool) -> None:
        self._by_time = by_time
        self._by_deadline = by_deadline
        self.cost_model = CostModel(model, None)

    def compose(self, plan: StepPlan) -> None:
        cost_model = self.cost_model
        decodes, prefills = split_running(plan.running)
        jobs, plan.infeasible = prefill_jobs(plan, plan.now, prefills, cost_model)
        decode(plan, self.due(decodes), victims=plan.running)
        shape = decode_shape(plan.decodes)
        limit, chunk = self.room(plan, decodes, shape)
        share = 1.0
        if chunk > 0:
            step = shape.copy()
            step.add(0, chunk, samples=True)
            seconds = cost_model.of(step)
            share = 1 - max(0.0, seconds - cost_model.seconds(chunk, 0)) / min(limit, seconds)
        kept, left_behind = self.split(plan, jobs, max(share, LEAST_SHARE))
        if not self._by_deadline:
            kept.sort(key=lambda job: job.state.request.arrival)
        late = plan.infeasible
        begun = [state for state in prefills if state.slo.next_deadline == inf or state in late]
        prompts = [job.state for job in (*kept, *left_behind)] + begun
        # Requests that ask to be rejected rather than served late end with this step.
        prompts += [state for state in late if not (state.block_ids or state.request.shed is ShedMode.REJECT)]
        prompts += plan.waiting.best_effort.first(plan.max_num_seqs)
        filler = StepFiller(
            plan, cost_model, shape, limit, num_left=min(chunk, plan.num_tokens_left), ends_by={}
        )
        filler.fill([state for state in prompts if state not in plan.victims])

    def due(self, decodes: list[RequestState]) -> list[RequestState]:
        """Return who of those that want a token gets one."""
        return decodes

    def room(self, plan: StepPlan, decodes: list[RequestState], shape: BatchShape) -> tuple[float, int]:  # noqa: ARG002
        """Return the seconds that a step may take, and the most tokens of prompts in it.

        Parameters
        ----------
        shape : of the decodes that are in it.
        """
        if not self._by_time:
            return inf, plan.num_tokens_left
        tbts = [state.slo.tbt for state in decodes if state.slo.next_deadline < inf]
        return min(tbts, default=inf), self.cost_model.efficient_chunk

    def split(
        self, plan: StepPlan, jobs: list[PromptJob], share: float
    ) -> tuple[list[PromptJob], list[PromptJob]]:
        """Return the prompts to serve by deadline, and those to leave behind.

        Parameters
        ----------
        share : of the time that goes into prompts.
        """
        return select_feasible(
            jobs,
            start=plan.now,
            share=share,
            cost=lambda job: None if job.state.is_protected else job.seconds / job.state.request.weight,
        )

    def commit(self, plan: StepPlan) -> None:  # noqa: ARG002 (what it has learnt of)
        """Take what the model has learnt."""
        self.cost_model.count()


class SlidingWindow(TriagedBudget):
    """A step chosen together with the next one (after SlidingServe, arXiv 2606.05933, its SlidingChunker).

    The longest step that the least slack allows leaves nothing of it to the step behind. Chunks of several
    lengths are tried, each with the longest that its next step may then have, and the two that compute most
    tokens a second are taken. Order and triage are those of the simple rule, where the paper has levels of
    priority and a knapsack.
    """

    def room(self, plan: StepPlan, decodes: list[RequestState], shape: BatchShape) -> tuple[float, int]:
        due = [
            state.slo.deadline_after(state.num_in_flight_tokens - state.num_in_flight_drafts, plan.now)
            for state in decodes
        ]
        first = min(due, default=inf) - plan.now
        if first == inf:
            return inf, plan.num_tokens_left
        both = min(map(add, due, [state.slo.tbt for state in decodes])) - plan.now
        longest = min(self.cost_model.max_chunk(shape, 0, first), plan.num_tokens_left)
        tried = sorted({longest * part // NUM_TRIED for part in range(1, NUM_TRIED + 1)}, reverse=True)
        return first, max(tried, key=lambda chunk: self._pace(plan, shape, chunk, both))

    def _pace(self, plan: StepPlan, shape: BatchShape, chunk: int, both: float) -> float:
        """Return the prompt tokens a second of two steps, of which the first has this chunk.

        Parameters
        ----------
        both : seconds that they may take together.
        """
        first, second = shape.copy(), shape.copy()
        if chunk:
            first.add(0, chunk, samples=True)
        seconds = self.cost_model.of(first)
        rest = min(self.cost_model.max_chunk(shape, chunk, both - seconds), plan.num_tokens_left)
        if rest:
            second.add(chunk, rest, samples=True)
        return (chunk + rest) / (seconds + self.cost_model.of(second))


def by_deadlines(make: Callable[[StepTimeModel], Composer], *, is_bound_by_time: bool = True) -> Composition:
    """Return a policy whose composer takes prompts by deadline."""
    return Composition(
        compose=lambda _config, model: make(model),
        order=first_deadline,
        needs_step_time=True,
        is_bound_by_time=is_bound_by_time,
        keeps_deadlines=True,
    )


def _triaged(*, by_time: bool, by_deadline: bool, make: type[TriagedBudget] = TriagedBudget) -> Composition:
    return by_deadlines(partial(make, by_time=by_time, by_deadline=by_deadline), is_bound_by_time=by_time)


TRIAGED = {
    "simple": _triaged(by_time=True, by_deadline=True),
    "sarathi-triage": _triaged(by_time=False, by_deadline=False),
    "edf-triage": _triaged(by_time=False, by_deadline=True),
    "sliding": _triaged(by_time=True, by_deadline=True, make=SlidingWindow),
}
