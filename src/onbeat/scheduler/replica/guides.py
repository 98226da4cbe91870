"""Rows under a grammar: what grammars may take of a step on the host, and who takes turns for it.

The time is learnt for each request, from what a trial of its grammar took on (`Grammar.seconds`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.step_plan import StepPlan

MOST_SECONDS = 0.02
"""That grammars are expected to take of a step: as long as the server lets one caller hold up all others.
Some 600 rows of usual schemas fit."""
_MEMORY = 4
"""Tokens over which the time of a request is averaged: states of a grammar differ by orders of magnitude, and
an answer is in most of them for a few tokens."""


def learn(states: Iterable[RequestState], seconds_of: Mapping[str, float]) -> None:
    """Learn what the rows of a step took, seconds by request id."""
    for state in states:
        if (seconds := seconds_of.get(state.request_id)) is not None:
            state.guide_seconds += (seconds - state.guide_seconds) / _MEMORY


def take_turns(running: Iterable[RequestState]) -> float:
    """Say which decodes sit out the next step; return the seconds that are left to prompts.

    Time is shared out evenly, and what cheap rows leave of their shares goes to dear ones: to those that have
    not run for longest, and to one of them whatever it takes.
    """
    guided, left = [], MOST_SECONDS
    for state in running:
        if state.is_guided:
            state.sits_out = False
            if state.num_wanted_tokens == 1 and not state.is_paused:
                guided.append(state)
    guided.sort(key=lambda state: state.guide_seconds)
    for place, state in enumerate(guided):
        if state.guide_seconds * (len(guided) - place) > left:
            dear = sorted(guided[place:], key=lambda state: state.last_step_id)
            break
        left -= state.guide_seconds
    else:
        return left
    for state in dear:
        state.sits_out = left < state.guide_seconds and state is not dear[0]
        left -= 0.0 if state.sits_out else state.guide_seconds
    return left


def trim_prompts(plan: StepPlan, left: float) -> None:
    """Leave the last token of a prompt to a later step if its first one does not fit; the first one does."""
    is_first = True

    def fitting(state: RequestState, num_wanted: int, num_new: int) -> int:
        nonlocal left, is_first
        if not state.is_guided or num_new < num_wanted or state.scores_prompt:
            return num_new
        if not is_first and state.guide_seconds > left:
            return num_new - 1
        is_first, left = False, left - state.guide_seconds
        return num_new

    plan.chunks = [
        (state, num_left)
        for state, num_new in plan.chunks
        if (num_left := fitting(state, state.num_wanted_tokens, num_new))
    ]
    for admission in plan.admissions:
        state, num_cached = admission.state, len(admission.cached_block_ids) * plan.kv.block_size
        admission.num_new_tokens = fitting(state, state.num_tokens - num_cached, admission.num_new_tokens)
    plan.admissions = [admission for admission in plan.admissions if admission.num_new_tokens]
