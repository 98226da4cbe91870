"""Niyama's scheduler (arXiv 2503.22562, later QoServe), as its authors published it in code.

The rules are those of `deadline_scheduler.py` in the branch `niyama_asplos2026` of microsoft/sarathi-serve:
dynamic chunks, hybrid priorities, eager relegation. Two things differ:

- The step-time model (its mean) stands for the two linear models that were fitted to one device.
- The published sort puts the decodes with the *most* slack first, which looks like a slip; here the least is
  first. It matters only where not all of them fit in a step.

Deadlines are those of the paper: token k (0 is the first) is due at `arrival + max(prefill time, ttft) + k
tbt`. The published code counts one token more, with which each token would come up to one `tbt` late.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, takewhile
from math import inf

from benchmarks.policies.triaged import decode, split_running
from onbeat.core.request import Request
from onbeat.core.slo import ShedMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import Composition
from onbeat.scheduler.replica.request_state import (
    BEST_EFFORT_RANK,
    RequestState,
    RequestStatus,
    deadline_and_pace,
)
from onbeat.scheduler.replica.step_plan import Composer, RunningList, StepPlan, WaitingQueue

CANDIDATES = (128, *range(256, 2049, 256), 2552)
"""Tokens that a step may have, decodes included."""
LOW_MEMORY_CANDIDATES = (128, 256, 384, 512)
LOW_MEMORY = 1000
"""Memory is low where a 32nd of the free KV tokens is below this."""
SAFETY = 1.2
"""A step is predicted to take this much less than the least slack."""
SECONDS_PER_TOKEN = 0.008
"""Weight of a prompt's remaining tokens in its priority: 0 is earliest deadline first, a large one shortest
remaining prompt first."""
FIRST_THROUGHPUT = 8500.0
"""Prompt tokens per second that are expected before any were seen."""
OLD_WEIGHT = 0.995
"""Of the expected throughput, against that of one more step."""
NO_DEADLINE_RANK = BEST_EFFORT_RANK / 2
"""Queue rank of requests without a TTFT deadline: behind those with one, before those relegated."""


def hybrid_priority(request: Request) -> float:
    """Return a request's rank: TTFT deadline plus `SECONDS_PER_TOKEN` a prompt token; without one, last."""
    due = deadline_and_pace(request)[0] + SECONDS_PER_TOKEN * len(request.prompt_token_ids)
    return min(due, NO_DEADLINE_RANK)


class NiyamaComposer(Composer):
    """All decodes, then as many prompt tokens as the least slack of the decodes allows, by priority.

    Attributes
    ----------
    throughput : expected prompt tokens per second: a moving average over the steps with prompts.
    """

    def __init__(self, model: StepTimeModel) -> None:
        self.throughput = FIRST_THROUGHPUT
        self._model = model

    def compose(self, plan: StepPlan) -> None:
        decodes, prefills = split_running(plan.running)
        slack = min(map(self.deadline, decodes), default=inf) - plan.now
        decode(plan, sorted(decodes, key=self.deadline), victims=plan.running)
        prefills = [state for state in prefills if state not in plan.victims]
        in_time, late = _by_priority(prefills, plan.waiting)
        head = next(in_time, None) or min(late, key=priority, default=None)
        if head is None:
            return
        shape = BatchShape()
        for state in plan.decodes:
            shape.add(state.num_computed_tokens, 1, samples=True)
        candidates = LOW_MEMORY_CANDIDATES if _is_memory_low(plan) else CANDIDATES
        total = step_tokens(self._model, shape, head.num_computed_tokens, slack, candidates)
        filler = _Filler(plan, total - len(plan.decodes))
        self._fill(filler, in_time if is_relegated(head) else chain([head], in_time), late)

    def commit(self, plan: StepPlan) -> None:
        """Take a step with prompts into the expected throughput, by its predicted time."""
        shape = planned_shape(plan)
        if shape.num_chunk_tokens:
            seen = shape.num_chunk_tokens / self._model.step_time(shape)
            self.throughput = OLD_WEIGHT * self.throughput + (1 - OLD_WEIGHT) * seen

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:
        """Return infinity while one more token for each changes nobody's place."""
        return 0.0 if waiting or len({state.slo.tbt for state in running}) > 1 else inf

    def deadline(self, state: RequestState) -> float:
        """Return when the next token to plan for a running request is due."""
        first = state.slo.first_delivery
        due = first if state.slo.ttft_deadline == inf else max(first, state.slo.ttft_deadline)
        num_out = state.num_output_tokens + state.num_in_flight_tokens
        return due + num_out * state.slo.tbt if num_out else due

    def _fill(self, filler: _Filler, in_time: Iterable[RequestState], late: list[RequestState]) -> None:
        """Serve prompts by priority; those that cannot be in time any more fall behind all others, once."""
        plan = filler.plan
        for state in in_time:
            if self._is_infeasible(state, plan):
                plan.infeasible.append(state)
            elif not filler.take(state):
                return
        # A request that asks to be rejected rather than served late ends with this step.
        late += [state for state in plan.infeasible if state.request.shed is not ShedMode.REJECT]
        for state in sorted(late, key=priority):
            if not filler.take(state):
                return

    def _is_infeasible(self, state: RequestState, plan: StepPlan) -> bool:
        """Whether a prompt that has not begun will be late (eager relegation)."""
        if state.status is not RequestStatus.WAITING or is_relegated(state) or state.num_output_tokens:
            return False
        time_left = state.slo.ttft_deadline - plan.now
        if state.num_wanted_tokens <= time_left * self.throughput:
            return False
        num_cached = len(plan.kv.match(state)) * plan.kv.block_size
        return state.num_wanted_tokens - num_cached > time_left * self.throughput


class _Filler:
    """Adds prompts to a plan until its tokens are used up."""

    def __init__(self, plan: StepPlan, num_tokens: int) -> None:
        self.plan = plan
        self._num_left = max(0, min(num_tokens, plan.num_tokens_left))
        self._admits = not plan.ran_out_of_blocks

    def take(self, state: RequestState) -> bool:
        """Add what fits of a prompt; False where the step is full."""
        if self._num_left < 1 or self.plan.num_rows_left < 1:
            return False
        if state.status is RequestStatus.WAITING:
            # No other goes in before one that found no room, or a long prompt would starve.
            self._admits = self._admits and self._admit(state)
            return True
        num_new = min(state.num_wanted_tokens, self._num_left)
        self.plan.chunks.append((state, num_new))
        self.plan.num_tokens_left -= num_new
        self._num_left -= num_new
        return True

    def _admit(self, state: RequestState) -> bool:
        """Take a waiting request in; False where there is no room for it."""
        plan = self.plan
        if state.num_in_flight_tokens or state.is_in_flight:
            return True  # preempted, and its last step is not back: its turn comes later
        if plan.num_slots_left < 1:
            return False
        cached_block_ids = plan.kv.match(state)
        num_cached = len(cached_block_ids) * plan.kv.block_size
        num_new = min(state.num_tokens - num_cached, self._num_left)
        if not plan.admit(state, cached_block_ids, num_new):
            return False
        self._num_left -= num_new
        return True


def step_tokens(
    model: StepTimeModel, decodes: BatchShape, num_cached: int, slack: float, candidates: Sequence[int]
) -> int:
    """Return how many tokens a step may have, decodes included.

    Parameters
    ----------
    model : predicts the step: its mean.
    decodes : shape of the step without prompts.
    num_cached : context of the first prompt; the step is predicted as if all its chunks had this one.
    slack : of the decode that is due first, seconds.
    candidates : ascending.

    Returns
    -------
    The largest of `candidates` whose predicted time, times `SAFETY`, is within the slack, or else the
    smallest, so that prompts get on however late the decodes are.
    """

    def seconds(num_tokens: int) -> float:
        trial = decodes.copy()
        if num_tokens > decodes.num_new_tokens:
            trial.add(num_cached, num_tokens - decodes.num_new_tokens, samples=True)
        return SAFETY * model.step_time(trial)

    if slack <= 0:
        return candidates[0]
    return candidates[max(0, bisect_right(candidates, slack, key=seconds) - 1)]


def planned_shape(plan: StepPlan) -> BatchShape:
    """Return the shape of a filled plan, each chunk taken to sample."""
    shape = BatchShape()
    for state in plan.decodes:
        shape.add(state.num_computed_tokens, 1, samples=True)
    for state, num_new in plan.chunks:
        shape.add(state.num_computed_tokens, num_new, samples=True)
    for admission in plan.admissions:
        num_cached = len(admission.cached_block_ids) * plan.kv.block_size
        shape.add(num_cached, admission.num_new_tokens, samples=True)
    return shape


def is_relegated(state: RequestState) -> bool:
    """Whether a request is served behind all others."""
    return state.sort_key[0] >= BEST_EFFORT_RANK


def priority(state: RequestState) -> tuple[float, ...]:
    """Return a prompt's place: relegated last, by deadline and remaining tokens, by arrival."""
    num_left = state.num_prompt_tokens - state.num_computed_tokens
    rank = state.slo.ttft_deadline + SECONDS_PER_TOKEN * num_left
    return is_relegated(state), rank, state.request.arrival


def _by_priority(
    prefills: list[RequestState], waiting: WaitingQueue
) -> tuple[Iterator[RequestState], list[RequestState]]:
    """Return the prompts that have begun or wait, by `priority`, and apart from them those relegated."""
    begun = sorted((state for state in prefills if not is_relegated(state)), key=priority)
    # The queue is sorted by priority, save for those relegated, which stand at its end by arrival.
    queued = takewhile(lambda state: not is_relegated(state), waiting)
    late = [state for state in prefills if is_relegated(state)]
    late += waiting.best_effort.first(len(waiting))
    return merge(begun, queued, key=priority), late


def _is_memory_low(plan: StepPlan) -> bool:
    return plan.num_blocks_left * plan.kv.block_size // 32 < LOW_MEMORY


NIYAMA = Composition(
    compose=lambda _config, model: NiyamaComposer(model),
    order=hybrid_priority,
    needs_step_time=True,
    is_bound_by_time=True,
    keeps_deadlines=True,
)
