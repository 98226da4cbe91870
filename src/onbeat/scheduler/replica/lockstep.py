"""Streams in lockstep: who gets a plain token in each step with decodes is counted once for all of them.

For a simulation of a policy that looks at no stream. Its steps carry prompts too, and a few rows that are
more than plain; those of the others cost nothing then. `tests/pure/simulator/test_steady.py` holds such
steps against those of single rows.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any

from onbeat.core.step import BatchShape, ScheduledRequest, SchedulerOutput, new_tuple
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.planner import Planner, StepInFlight
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.step_plan import StepPlan, sort_key

DECODE = ScheduledRequest("", 0, 1, (), samples=True)
"""The row of each plain decode of a step whose rows nobody reads."""


class Lockstep:
    """Running requests that are out of the running list as long as each of their tokens is a plain one.

    What is known of one stands as of the step at which it has joined, its blocks left out, until it leaves:
    ahead of a token that may end it or fill a block, or with all others, where somebody looks at them.

    Parameters
    ----------
    planner : plans the steps of a batch that has no request yet, one after the other.
    kv : where blocks come from; of a single table.
    token_id : what every row samples; it ends no request.

    Attributes
    ----------
    max_steps : as of `SteadyRun`, for which it stands where steps are theirs alone.
    has_planned_others : since the policy has last heard of a step of theirs alone.
    num_rows : how many they are.
    context : tokens that their next step reads.
    num_begun, num_steps : steps of theirs that were planned, and those of them that have come back.
    """

    def __init__(self, planner: Planner, kv: KVCacheManager, token_id: int) -> None:
        self._planner, self._kv, self._tokens = planner, kv, [token_id]
        make = planner.new_plan
        self._nothing = make(0.0)
        self._running, self._waiting = self._nothing.running, self._nothing.waiting
        make_plan: Callable[..., StepPlan] = LockstepPlan
        planner.new_plan = partial(make_plan, *make.args, lockstep=self, **make.keywords)
        self.has_planned_others = False
        self.num_rows = self.context = self.num_begun = self.num_steps = 0
        self._ends: array[float] = array("d")
        """Of all steps that have come back, seconds."""
        self._due: list[tuple[int, tuple[float, ...], RequestState, int]] = []
        """A heap: ahead of which step each leaves, its place, and ahead of which it has joined."""
        self._growing: list[list[RequestState]] = [[] for _ in range(kv.block_size)]
        """Who needs a block in which steps: every so many, one."""

    def plan(self, now: float) -> SchedulerOutput | None:
        """Return the next step where it has a row of each of these and no other; else None.

        As `Scheduler.schedule`, to which it comes where nobody waits, and nobody is to leave.
        """
        planner, pool = self._planner, self._kv.pool
        if self._running:
            self.gather()
        has_others = self._running or self._waiting.length or pool.kept.ends
        if has_others or not 0 < self.num_rows <= pool.num_free_blocks:
            return None
        in_flight, shape = planner.in_flight, BatchShape()
        step_id, in_flight.last_plan = in_flight.num_planned, now
        if self.has_planned_others:
            self.has_planned_others = False
            planner.policy.composer.commit(self._nothing)
        self.begin_step(shape)
        in_flight.append(new_tuple(StepInFlight, (step_id, [], (), now, 0.0, 0.0)))
        in_flight.num_planned += 1
        return new_tuple(SchedulerOutput, (step_id, (), (), (), shape, None, None, (), (), (), ()))

    def run(self) -> Lockstep | None:
        """Return what runs the step under way again; None where its last run is the first.

        With the last somebody leaves, or may lack a block.
        """
        most = (self._kv.pool.num_free_blocks // self.num_rows - 1) * self._kv.block_size + 1
        self.max_steps = min(self._due[0][0] - self.num_steps + 1, most)
        return self if self.max_steps > 1 else None

    def gather(self) -> int:
        """Take in who runs and is known to get a plain token next; return the blocks that this needs of all.

        No step is under way. Where blocks are so few that somebody may be preempted, all go on in rows of
        their own.
        """
        for state in self._running.copy():
            if state.plain_until and not state.is_guided:
                self._join(state)
        place = self.num_begun % len(self._growing)
        if len(self._growing[place]) + len(self._running) > self._kv.pool.num_free_blocks:
            for _, _, each, joined in self._due:
                self._leave(each, joined)
            self._due.clear()
        return len(self._growing[place])

    def _join(self, state: RequestState) -> None:
        num_steps = self.num_steps
        due = num_steps + state.plain_until - state.num_tokens
        grows = num_steps + state.num_allocated_tokens - state.num_computed_tokens
        heappush(self._due, (due, state.sort_key, state, num_steps))
        if grows <= due:
            self._growing[grows % len(self._growing)].append(state)
        self.num_rows += 1
        self.context += state.num_computed_tokens + 1
        self._running.remove(state)

    def _leave(self, state: RequestState, joined: int) -> None:
        """Let a request go on in a row of its own, with what it has got."""
        num_tokens, num_begun = self.num_steps - joined, self.num_begun
        state.num_computed_tokens += num_begun - joined
        state.num_in_flight_tokens = num_begun - self.num_steps
        state.num_tokens += num_tokens
        state.output_token_ids += self._tokens * num_tokens
        if state.times is not None:
            state.times.extend(self._ends[joined:])
        place = (num_begun + state.num_allocated_tokens - state.num_computed_tokens) % len(self._growing)
        self._growing[place] = [each for each in self._growing[place] if each is not state]
        self.num_rows -= 1
        self.context -= state.num_computed_tokens + 1
        insort(self._running, state, key=sort_key)

    def begin_step(self, shape: BatchShape) -> None:
        """Let a step have a row of each."""
        num_rows, self._shape = self.num_rows, shape
        shape.num_decodes += num_rows
        shape.num_new_tokens += num_rows
        shape.num_sequences += num_rows
        shape.num_lm_head_rows += num_rows
        shape.decode_context_tokens += self.context
        self._begin(1)

    def end_step(
        self, states: list[RequestState], rows: tuple[ScheduledRequest, ...], now: float
    ) -> tuple[list[RequestState], tuple[ScheduledRequest, ...]]:
        """Give each a token, if the step has a row of each.

        Parameters
        ----------
        states, rows : of the step, beside theirs.
        now : when it has ended, seconds.

        Returns
        -------
        The states and rows that are more than plain, with those who leave ahead of their tokens.
        """
        if self.num_begun == self.num_steps:
            return states, rows
        leaving, due, num_steps = [], self._due, self.num_steps
        while due and due[0][0] <= num_steps:
            _, _, state, joined = heappop(due)
            self._leave(state, joined)
            leaving.append(state)
        self.num_steps = num_steps + 1
        self._ends.append(now)
        if leaving:
            num_decodes = rows.count(DECODE)
            decodes = sorted([*states[:num_decodes], *leaving], key=sort_key)
            states, rows = decodes + states[num_decodes:], (DECODE,) * len(leaving) + rows
        return states, rows

    def advance(self, ends: Sequence[float]) -> None:
        """See `SteadyRun.advance`."""
        planner, num_steps = self._planner, len(ends)
        self._begin(num_steps)
        self.num_steps += num_steps
        self._ends.extend(ends)
        self._shape.decode_context_tokens += num_steps * self.num_rows
        planner.in_flight.num_planned += num_steps
        planner.in_flight.last_plan = planner.last_end = ends[-1]

    def _begin(self, num_steps: int) -> None:
        """Take the blocks of steps that begin."""
        growing, states = self._growing, []
        for step in range(self.num_begun, self.num_begun + num_steps):
            states += growing[step % len(growing)]
        if states:
            for state, block_id in zip(states, self._kv.pool.allocate(len(states)), strict=True):
                state.block_ids.append(block_id)
                state.num_allocated_tokens += len(growing)
        self.num_begun += num_steps
        self.context += num_steps * self.num_rows


class LockstepPlan(StepPlan):
    """A plan in which streams in lockstep stand beside the others, one row each."""

    def __init__(self, *args: Any, lockstep: Lockstep, **kwargs: Any) -> None:
        self._lockstep, lockstep.has_planned_others = lockstep, True
        self._num_growing = lockstep.gather()
        super().__init__(*args, **kwargs)
        self.max_num_seqs -= lockstep.num_rows

    def decode_running(self) -> None:
        """Give one token to those in lockstep, too."""
        self.num_beside = num_rows = self._lockstep.num_rows
        self.num_blocks_left -= self._num_growing
        self.num_tokens_left -= num_rows
        self.max_rows -= num_rows
        super().decode_running()

    def _num_spare_blocks(self, num_gone: int = 0) -> int:
        return super()._num_spare_blocks(-1 if self._lockstep.num_rows else num_gone)
