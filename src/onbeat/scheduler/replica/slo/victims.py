"""Whom to preempt: for KV blocks that running requests need, for slots and blocks that a prompt needs."""

from __future__ import annotations

from math import inf

from onbeat.scheduler.replica.preemption_cost import RECENT_SECONDS, Candidate, choose_victim
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.book import PromiseBook
from onbeat.scheduler.replica.slo.deadlines import is_left_over
from onbeat.scheduler.replica.slo.step_times import StepTimes
from onbeat.scheduler.replica.slo.view import next_due
from onbeat.scheduler.replica.step_plan import StepPlan


def make_blocks_free(
    plan: StepPlan, rows: list[RequestState], times: StepTimes, book: PromiseBook
) -> list[RequestState]:
    """Preempt requests, the cheapest first, until the rest of `rows` can grow; return that rest.

    Those that the plan has given a row keep it. The last request in the batch is never preempted, so that
    somebody goes on.
    """
    rows = list(rows)
    planned = {id(state) for state in (*plan.victims, *plan.decodes)}
    pool = [state for state in plan.running if id(state) not in planned and not state.is_in_flight]
    while len(pool) > 1 and _num_growing(rows) > plan.num_blocks_left:
        index = choose_victim(
            [_candidate(state, plan, times, book) for state in pool], times.work.recompute_seconds
        )
        if index is None:
            break
        victim = pool.pop(index)
        plan.preempt(victim)
        rows = [state for state in rows if state is not victim]
    num_over = _num_growing(rows) - plan.num_blocks_left
    if num_over > 0:  # nobody else can go: some wait for a block
        waits = {id(state) for state in sorted(filter(_is_growing, rows), key=next_due)[-num_over:]}
        rows = [state for state in rows if id(state) not in waits]
    return rows


def make_room(
    plan: StepPlan,
    newcomer: RequestState,
    pool: list[RequestState],
    times: StepTimes,
    book: PromiseBook,
) -> bool:
    """Preempt requests of a pool, the cheapest first, until a waiting one has its slot and its blocks.

    Returns whether that is so. Nobody is preempted in vain, and nobody twice within `RECENT_SECONDS`.
    """
    pool = [
        state
        for state in pool
        if not state.num_in_flight_tokens
        and not state.is_in_flight
        and plan.now - state.last_preemption > RECENT_SECONDS
    ]
    can_free = sum(map(plan.num_freed_by, pool))
    if not pool or can_free < plan.num_blocks_missing(newcomer):
        return False
    while plan.num_slots_left < 1 or plan.num_blocks_missing(newcomer) > 0:
        candidates = [_candidate(state, plan, times, book) for state in pool]
        index = choose_victim(candidates, times.work.recompute_seconds)
        if index is None:
            return False
        plan.preempt(pool.pop(index))
    return True


def _is_growing(state: RequestState) -> bool:
    return state.num_computed_tokens >= state.num_allocated_tokens


def _num_growing(rows: list[RequestState]) -> int:
    return sum(map(_is_growing, rows))


def _candidate(state: RequestState, plan: StepPlan, times: StepTimes, book: PromiseBook) -> Candidate:
    limit = max(1, state.max_total_tokens - state.num_tokens)
    done = state.num_output_tokens
    remaining = book.lengths.remaining(state.request.slo_class, done, q=0.5, limit=limit)
    resume = times.work.recompute_seconds(0, state.num_tokens)
    due = next_due(state)
    return Candidate(
        context_tokens=state.num_computed_tokens,
        cached_tokens=0,
        freed_blocks=plan.num_freed_by(state),
        arrival=state.request.arrival,
        is_best_effort=is_left_over(state),
        progress=done / (done + remaining),
        was_preempted_recently=plan.now - state.last_preemption < RECENT_SECONDS,
        weight=book.of(state),
        slack_after_resume=inf if due == inf else due - plan.now - resume,
    )
