"""Puts prompts into a step until its time is spent, and takes requests out of the batch for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.cost_model import CostModel
from onbeat.scheduler.replica.step_plan import StepPlan, needs_block


class StepFiller:
    """Adds chunks to a plan that has its decodes, and knows the time that the step takes so far.

    Parameters
    ----------
    shape : the decodes.
    limit : seconds that the step may take.
    most_chunk_tokens : of all prompts together.
    ends_by : request id -> seconds after which a step that ends this prompt is too long for it.
    """

    def __init__(
        self,
        plan: StepPlan,
        cost_model: CostModel,
        shape: BatchShape,
        *,
        limit: float,
        most_chunk_tokens: int,
        ends_by: Mapping[str, float] | None = None,
    ) -> None:
        self._plan = plan
        self._cost_model = cost_model
        self._shape = shape.copy()
        self._limit = limit
        self._ends_by = ends_by or {}
        self._due = inf
        """The first of these of prompts that the step ends."""
        self._num_left = min(most_chunk_tokens, plan.num_tokens_left)
        self._is_blocked = plan.ran_out_of_blocks
        """Whether a prompt waits for a slot or for memory."""

    def fill(self, states: Iterable[RequestState]) -> bool:
        """Add as much of these prompts, in this order, as fits; return whether there is room for others.

        No prompt overtakes one that waits for a slot or for memory, but one that has both goes on.
        """
        for state in states:
            if self._num_left < 1 or self._plan.num_rows_left < 1:
                return False
            if state.status is not RequestStatus.WAITING:
                is_through = self._continue(state)
            elif self._is_blocked or not self._may_join(state):
                self._is_blocked = True
                continue
            else:
                is_through = self._admit(state)
            if not is_through:
                return False
        return True

    def leave_margin(self) -> None:
        """Let what follows make no prompt late that the step ends, even if the step takes long.

        It is for those who have no deadline that can be met: they lose nothing by the next step.
        """
        certain = self._due / self._cost_model.spread
        if certain < self._limit:
            self._limit = min(self._limit, max(certain, self._cost_model.of(self._shape)))

    def _continue(self, state: RequestState) -> bool:
        """Add a chunk of a running request; False where the time is used up."""
        num_cached, num_wanted = state.num_computed_tokens, state.num_wanted_tokens
        num_new = self._chunk(state, num_cached, num_wanted)
        if num_new:
            self._plan.chunks.append((state, num_new))
            self._plan.num_tokens_left -= num_new
            self._count(state, num_cached, num_new)
        return num_new == num_wanted

    def _may_join(self, state: RequestState) -> bool:
        # A preempted request may still be in a step in flight; its turn comes when that is back.
        return self._plan.num_slots_left > 0 and not (state.num_in_flight_tokens or state.is_in_flight)

    def _admit(self, state: RequestState) -> bool:
        """Take a waiting request in; False where the time is used up."""
        plan = self._plan
        cached_block_ids = plan.kv.match(state)
        num_cached = len(cached_block_ids) * plan.kv.block_size
        plan.num_hit_tokens[state.request_id] = num_cached
        num_wanted = state.num_tokens - num_cached
        num_new = self._chunk(state, num_cached, num_wanted)
        if num_new == 0:
            return False
        if not plan.admit(state, cached_block_ids, num_new):
            self._is_blocked = True
            return True
        self._count(state, num_cached, num_new)
        return num_new == num_wanted

    def _chunk(self, state: RequestState, num_cached: int, num_wanted: int) -> int:
        """Return how much of a prompt fits."""
        most = min(num_wanted, self._num_left)
        if self._limit < inf:
            scores = state.scores_prompt
            trial = self._shape.copy()
            trial.add(num_cached, most, samples=most if scores else 1)
            if self._cost_model.of(trial) > self._limit:
                longest = self._cost_model.max_chunk(self._shape, num_cached, self._limit, scores=scores)
                most = min(most, longest)
        return most

    def _count(self, state: RequestState, num_cached: int, num_new: int) -> None:
        self._shape.add(num_cached, num_new, samples=num_new if state.scores_prompt else 1)
        self._num_left -= num_new
        ends_by = self._ends_by.get(state.request_id, inf)
        if num_cached + num_new == state.num_tokens:
            # Its token comes with the step's end: what else goes into the step must not make it late.
            self._due = min(self._due, ends_by)
            if ends_by < self._limit:
                self._limit = max(ends_by, self._cost_model.of(self._shape))


Loss = Callable[[RequestState], tuple[float, ...]]
"""A key of running requests: the greatest is the first to be preempted. Its tokens are computed again when it
resumes (recompute preemption; KV is not moved to the host)."""


def free_blocks(plan: StepPlan, rows: list[RequestState], loss: Loss) -> list[RequestState]:
    """Preempt until those of `rows` that are left can grow; return these.

    Those that the plan has given a row keep it. One request always stays, so that the batch never stops.
    """
    planned = {id(state) for state in (*plan.victims, *plan.decodes)}
    pool = [state for state in plan.running if id(state) not in planned and not state.is_in_flight]
    pool.sort(key=loss)
    num_growing = plan.num_growing(rows)
    while len(pool) > 1 and num_growing > plan.num_blocks_left:
        victim = pool.pop()
        plan.preempt(victim)
        rows = [state for state in rows if state is not victim]
        num_growing = plan.num_growing(rows)
    num_over = num_growing - plan.num_blocks_left
    if num_over > 0:  # no others can be preempted: some wait for a block
        waits = {id(state) for state in sorted(filter(needs_block, rows), key=loss)[-num_over:]}
        rows = [state for state in rows if id(state) not in waits]
    return rows


def preempt_for(plan: StepPlan, prompt: RequestState, pool: Iterable[RequestState], loss: Loss) -> bool:
    """Preempt requests of a pool until a waiting one has its slot and its blocks; none in vain.

    Returns whether that is so.
    """
    pool = sorted([state for state in pool if not state.is_in_flight], key=loss)
    if not pool or not plan.has_blocks_for(prompt, without=pool):
        return False
    while plan.num_slots_left < 1 or not plan.has_blocks_for(prompt):
        if not pool:
            return False
        plan.preempt(pool.pop())
    return True
