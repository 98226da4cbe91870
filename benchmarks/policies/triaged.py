"""Simple rules to compare `slo` with: a static token budget with triage, and a time budget with triage."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from onbeat.core.slo import ShedMode
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import Composition, needed_model
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK, first_deadline
from onbeat.scheduler.replica.slo.view import StepFiller, decode_shape, prefill_jobs
from onbeat.scheduler.replica.step_plan import Composer, StepPlan, needs_block
from onbeat.scheduler.triage import LEAST_SHARE, select_feasible


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
        self._cost_model = CostModel(model, None)

    def compose(self, plan: StepPlan) -> None:
        cost_model = self._cost_model
        decodes, prefills = split_running(plan.running)
        jobs, plan.infeasible = prefill_jobs(plan, plan.now, prefills, cost_model)
        decode(plan, decodes, victims=plan.running)
        shape = decode_shape(plan.decodes)
        limit, chunk = inf, plan.num_tokens_left
        if self._by_time:
            limit = min([state.slo.tbt for state in decodes if state.slo.next_deadline < inf], default=inf)
            chunk = cost_model.efficient_chunk
        share = 1.0
        if chunk > 0:
            step = shape.copy()
            step.add(0, chunk, samples=True)
            seconds = cost_model.of(step)
            share = 1 - max(0.0, seconds - cost_model.seconds(chunk, 0)) / min(limit, seconds)
        kept, left_behind = select_feasible(
            jobs,
            start=plan.now,
            share=max(share, LEAST_SHARE),
            cost=lambda job: None if job.state.is_protected else job.seconds / job.state.request.weight,
        )
        if not self._by_deadline:
            kept.sort(key=lambda job: job.state.request.arrival)
        late = {id(state) for state in plan.infeasible}
        begun = [state for state in prefills if state.slo.next_deadline == inf or id(state) in late]
        prompts = [job.state for job in (*kept, *left_behind)] + begun
        # Requests that ask to be rejected rather than served late end with this step.
        prompts += [
            state
            for state in plan.infeasible
            if not state.block_ids and state.request.shed is not ShedMode.REJECT
        ]
        prompts += plan.waiting.first_from(BEST_EFFORT_RANK, plan.max_num_seqs)
        filler = StepFiller(plan, cost_model, shape, limit=limit, most_chunk_tokens=chunk)
        filler.fill([state for state in prompts if state not in plan.victims])

    def commit(self, plan: StepPlan) -> None:  # noqa: ARG002 (what it has learnt of)
        """Take what the model has learnt."""
        self._cost_model.count()


def _triaged(*, by_time: bool, by_deadline: bool) -> Composition:
    return Composition(
        compose=lambda config, model: TriagedBudget(
            needed_model(config, model), by_time=by_time, by_deadline=by_deadline
        ),
        order=first_deadline,
        needs_step_time=True,
        is_bound_by_time=by_time,
        keeps_deadlines=True,
    )


TRIAGED = {
    "simple": _triaged(by_time=True, by_deadline=True),
    "sarathi-triage": _triaged(by_time=False, by_deadline=False),
    "edf-triage": _triaged(by_time=False, by_deadline=True),
}
