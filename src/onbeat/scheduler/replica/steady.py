"""Steady runs: steps of decodes in which nothing but token counts changes, taken many at a time.

For those who know what comes: a simulator, where no request comes or ends before it says so. Step by step it
would call `Scheduler.update` with the result of one and `Scheduler.schedule` for the next. A run comes to the
same and plans once, however long it is; `tests/pure/simulator/test_steady.py` holds one against the other.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from math import inf

from onbeat.core.step import SchedulerOutput
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.lockstep import Lockstep
from onbeat.scheduler.replica.request_state import NEVER, TOLERANCE, RequestState, RequestStatus, SLOState
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.slo.composer import SLOComposer
from onbeat.scheduler.replica.tracker import OUTPUT_WEIGHT


def begin_run(scheduler: Scheduler, scheduled: SchedulerOutput, token_id: int) -> SteadyRun | Lockstep | None:
    """Return the run that begins with a step that was just planned; None where it has no other step.

    Parameters
    ----------
    scheduler : its steps do not overlap.
    token_id : what every row samples; it ends no request.
    """
    shape, lockstep = scheduled.shape, scheduler.table.lockstep
    if (
        shape.num_chunks
        or scheduled.admitted
        or len(scheduled.rows) < len(scheduler.running)
        or shape.num_guided_rows
        or scheduler.config.speculation is not None  # each step asks anew how many drafts pay
        # Whom the step has preempted the next one may take in again.
        or any(map(scheduler.table.states.__contains__, scheduled.released_ids))
    ):
        return None
    limit = scheduler.policy.composer.steady_limit(scheduler.running, scheduler.waiting)
    model = scheduler.step_time_model
    if limit < inf:
        # What a policy with deadlines has predicted of the step, if that is by the same quantile.
        seconds = scheduler.in_flight[0].seconds if scheduler.quantile is None else 0.0
        if model is None or (seconds or model.step_time(shape, scheduler.quantile)) > limit:
            return None
    if lockstep is not None and not scheduled.rows and model is None:
        return lockstep.run()
    states, max_steps = _rows_and_steps(scheduler.running, scheduler.kv, lockstep)
    if (costs := scheduler.planner.cost_model) is not None:
        tbts = [state.slo.tbt_objective for state in scheduler.running]
        if lockstep is not None:
            tbts += [tbt for tbt, peers in lockstep.peers.items() if peers.states]
        if min(tbts) < costs.shortest_tbt:  # it binds no step, but may once costs are taken anew
            max_steps = min(max_steps, costs.num_left)
    return None if max_steps <= 1 else SteadyRun(scheduler, scheduled, states, limit, max_steps, token_id)


def begin_lockstep(scheduler: Scheduler, token_id: int) -> None:
    """Count streams at once from now on, where nothing looks at each of them in each step.

    Parameters
    ----------
    scheduler : it has no request; its steps do not overlap.
    token_id : what every row samples; it ends no request.
    """
    table, config, planner = scheduler.table, scheduler.config, scheduler.planner
    # A composer of a study may look at any.
    is_known = not scheduler.policy.known.needs_step_time or type(scheduler.policy.composer) is SLOComposer
    if (
        is_known
        and not (table.makes_rows or config.scheduling_policy == "priority")
        and config.num_tables == config.num_micro_batches == 1
    ):
        table.lockstep = Lockstep(planner, table.kv, token_id)


def _rows_and_steps(
    running: Sequence[RequestState], kv: KVCacheManager, lockstep: Lockstep | None
) -> tuple[list[RequestState], int]:
    """Return the rows that sample, and how often they may before one ends or may lack a block.

    Whoever waits could not be admitted, and while only token counts grow that stays so, up to the moment at
    which a new full block can be found in the prefix cache. A first token is a step of its own.

    Parameters
    ----------
    running : each has been advanced by the first of these tokens already.
    lockstep : the rows that it has are no part of what is returned.
    """
    num_beside = 0 if lockstep is None else lockstep.num_rows
    states, max_steps = [], lockstep.num_plain_steps if lockstep is not None and num_beside else NEVER
    block_size, has_names = kv.block_size, kv.enable_prefix_caching
    is_running = RequestStatus.RUNNING
    for state in running:
        if state.status is not is_running:  # a padding row runs its last token again and again
            continue
        states.append(state)
        num_tokens, num_computed = state.num_tokens, state.num_computed_tokens
        if num_tokens == state.num_prompt_tokens:
            return states, 1
        num_left = state.max_total_tokens - num_tokens
        if num_left < max_steps:
            max_steps = num_left
        if has_names:
            hashes = state.request.block_hashes
            if hashes is None or len(hashes) > (num_computed - 1) // block_size:
                max_steps = min(max_steps, 1 + -num_computed % block_size)
    num_rows = len(states) + num_beside
    if not num_rows:
        return states, 1
    # Every row may be about to need a block, and then one more each block_size tokens.
    num_blocks_each = kv.pool.num_free_blocks // (num_rows * kv.num_tables)
    return states, min(max_steps, (num_blocks_each - 1) * block_size + 1)


class SteadyRun:
    """A step in flight that is run again and again.

    `Scheduler.update` ends it with its last step, once `advance` was told of all before.

    Attributes
    ----------
    max_steps : how often it may be run.
    limit : seconds; only a step that is predicted to take no longer is planned once more. Where it is finite,
        `num_followed` is to be asked of each step but the last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        scheduled: SchedulerOutput,
        states: list[RequestState],
        limit: float,
        max_steps: int,
        token_id: int,
    ) -> None:
        self.max_steps, self.limit = max_steps, limit
        self._scheduler, self._shape = scheduler, scheduled.shape
        self._states = states
        self._token_id = token_id
        self._planned_at = scheduler.in_flight[0].planned_at
        self._num_rows = scheduled.shape.num_lm_head_rows
        if (model := scheduler.planner.model) is not None:
            self._model = model
            self._learnt = scheduled.shape.copy()
            """The shape of the last step whose time was learnt; before, of the one ahead of the first."""
            self._learnt.decode_context_tokens -= self._num_rows

    def num_followed(self, ends: Sequence[float]) -> int:
        """Return how many steps are planned once more, by what is learnt up to each; nothing is learnt here.

        Whoever comes may cut the run, and then no more is learnt than has been.

        Parameters
        ----------
        ends : of all steps that it has not taken: when each of them ends, seconds.
        """
        planner, quantile = self._scheduler.planner, self._scheduler.quantile
        num_known = bisect_right(ends, planner.last_end)
        begun, some = max(self._planned_at, planner.last_end), ends[num_known:]
        if not some or self._model.is_within(self._learnt, begun, some, self.limit, quantile):
            return len(ends)
        ahead = deepcopy(self._model)
        num, goes_on = ahead.observe_run(self._learnt.copy(), begun, some, self.limit, quantile)
        return num_known + (num if goes_on else num - 1)

    def learn(self, ends: Sequence[float], limit: float = inf) -> int:
        """Learn from steps, as `Planner.observe` of each, those that are known left out.

        See `StepTimeModel.observe_run`.

        Parameters
        ----------
        limit : seconds; it stops at a step behind which the next is predicted to take longer.

        Returns
        -------
        How many are followed by one that is not.
        """
        planner, quantile = self._scheduler.planner, self._scheduler.quantile
        costs, num, goes_on = planner.cost_model, bisect_right(ends, planner.last_end), True
        while goes_on and num < len(ends):
            # No more than until costs are taken anew.
            some = ends[num:] if costs is None else ends[num : num + costs.num_left]
            begun = max(self._planned_at, planner.last_end)
            num_learnt, goes_on = self._model.observe_run(self._learnt, begun, some, limit, quantile)
            num += num_learnt
            planner.last_end = ends[num - 1]
            if costs is not None:
                costs.count(num_learnt)
        return num if goes_on else num - 1

    def advance(self, ends: Sequence[float]) -> None:
        """Take the results of steps; the next one is under way.

        Parameters
        ----------
        ends : when each of them ended, seconds; at least one.
        """
        num_steps, scheduler = len(ends), self._scheduler
        if (planner := scheduler.planner).model is None:
            planner.last_end = ends[-1]
        else:
            self.learn(ends)
        self._give(ends)
        shape, in_flight = self._shape, scheduler.in_flight
        shape.decode_context_tokens += num_steps * self._num_rows
        in_flight.num_planned += num_steps
        in_flight.last_plan = ends[-1]
        if scheduler.policy.slo is not None and scheduler.step_time_model is not None:
            in_flight.busy_until = ends[-1] + scheduler.step_time_model.step_time(shape)

    def _give(self, ends: Sequence[float]) -> None:
        """Give each request a token, and its KV slot, for each end."""
        if (lockstep := self._scheduler.table.lockstep) is not None and lockstep.num_rows:
            self._states += lockstep.go_on(ends)
        num_steps, token_ids = len(ends), [self._token_id] * len(ends)
        growing: list[RequestState] = []
        for state in self._states:
            state.num_computed_tokens += num_steps
            state.num_tokens += num_steps
            state.output_token_ids += token_ids
            if state.times is not None:
                state.times.extend(ends)
            if state.num_computed_tokens > state.num_allocated_tokens:
                growing.append(state)
        if growing:
            self._scheduler.kv.grow_each(growing)
        if self._scheduler.policy.known.keeps_deadlines:
            self._note_deliveries(ends)

    def _note_deliveries(self, ends: Sequence[float]) -> None:
        """Hold deliveries against their deadlines; see `SLOTracker.on_deliveries`."""
        policy = self._scheduler.policy.slo
        tracker = None if policy is None else policy.tracker
        has_tenants = tracker is not None and tracker.tenants.are_several
        last = ends[-1]
        for state in self._states:
            slo, has_missed = state.slo, False
            if slo.next_deadline == inf:  # it has none, or has missed it
                slo.last_delivery = last
            elif slo.is_regular and last <= slo.next_deadline:  # with what it is ahead all are in time
                due = slo.next_deadline
                for _ in ends:
                    due += slo.tbt
                slo.objective_deadline = slo.next_deadline = due
                slo.last_delivery = last
            elif slo.end < inf and tracker is not None:
                has_missed = tracker.note_paced(state, 1, ends)
            else:
                has_missed = note_deliveries(slo, ends)
            if has_missed and tracker is not None:
                tracker.num_missed += 1
            if has_tenants and tracker is not None:
                tracker.tenants.charge(state.request.tenant, OUTPUT_WEIGHT * len(ends))


def note_deliveries(slo: SLOState, ends: Sequence[float]) -> bool:
    """Move on after steps with a token each, none of them the first; return whether the objective was missed.

    Comes to `note_delivery` of each, for many tokens in little time.
    """
    has_missed, due, tbt = False, slo.objective_deadline, slo.tbt_objective
    is_slow = not slo.is_regular
    for now in ends:
        if is_slow or now > due + TOLERANCE:
            slo.objective_deadline = due
            has_missed |= slo.note_delivery(now)
            due, is_slow = slo.objective_deadline, not slo.is_regular
        else:
            due += tbt
    if not is_slow:
        slo.objective_deadline = slo.next_deadline = due
    slo.last_delivery = ends[-1]
    return has_missed
