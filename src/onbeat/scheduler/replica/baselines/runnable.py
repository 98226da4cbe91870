"""What a composer with an order of its own asks of a plan: who may run, who falls."""

from __future__ import annotations

from collections.abc import Iterable

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.step_plan import StepPlan, needs_block


def split_running(running: Iterable[RequestState]) -> tuple[list[RequestState], list[RequestState]]:
    """Return the requests that may run now: those that want one token, and those with more of a prompt."""
    decodes: list[RequestState] = []
    prefills: list[RequestState] = []
    for state in running:
        if state.is_in_flight or (state.num_in_flight_tokens and state.will_be_full):
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
