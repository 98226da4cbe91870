"""The prompts that can still be in time, and how much work each has left."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from onbeat.core.slo import ShedMode
from onbeat.scheduler.replica.named_tuples import new_tuple
from onbeat.scheduler.replica.queues import WaitingQueue
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork
from onbeat.scheduler.replica.slo.triage import Job


def prefill_jobs(
    now: float, prefills: Iterable[RequestState], waiting: WaitingQueue, work: PrefillWork
) -> tuple[list[Job], list[RequestState]]:
    """Return the prompts with deadlines in their order, and those that have just been lost.

    A prompt is lost once not even an idle machine would be in time. One that nobody may judge
    (`ShedMode.OFF`) keeps its turn.
    """
    jobs: list[Job] = []
    lost: list[RequestState] = []
    earliest = now + work.step_seconds
    for state in prefills:
        deadline = state.ttft_deadline
        if state.is_best_effort or deadline == inf or state.num_output_tokens:
            continue
        seconds = work.seconds(state.num_wanted_tokens, state.num_computed_tokens)
        if earliest + seconds > deadline and state.request.shed is not ShedMode.OFF:
            lost.append(state)
        else:
            jobs.append(Job(deadline, seconds, state))
    # `work.seconds` without its calls, since the whole queue is looked at for each step.
    token, pair = work.coefficients
    keeps_turn, add_job = ShedMode.OFF, jobs.append
    for state in waiting.before(BEST_EFFORT_RANK):
        num_cached = state.num_hit_tokens
        num_tokens = state.num_tokens - num_cached
        seconds = num_tokens * (token + pair * (num_cached + 0.5 * num_tokens))
        deadline = state.sort_key[0]
        if earliest + seconds > deadline and state.request.shed is not keeps_turn:
            lost.append(state)
        else:
            add_job(new_tuple(Job, (deadline, seconds, state)))
    jobs.sort(key=_deadline)
    return jobs, lost


def _deadline(job: Job) -> float:
    return job.deadline
