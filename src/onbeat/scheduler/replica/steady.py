"""Steady runs: steps of decodes in which nothing but token counts changes, taken many at a time.

For those who know what comes: a simulator, where no request comes or ends before it says so. Step by step it
would call `Scheduler.update` with the result of one and `Scheduler.schedule` for the next. A run comes to the
same and plans once, however long it is; `tests/pure/simulator/test_steady.py` holds one against the other.
Where nobody learns and nobody waits it goes on without those who end.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from copy import deepcopy
from math import inf

from onbeat.core.request import RequestOutput
from onbeat.core.step import ModelRunnerOutput, SchedulerOutput, new_tuple
from onbeat.scheduler.replica.kv import KVCacheManager
from onbeat.scheduler.replica.planner import StepInFlight
from onbeat.scheduler.replica.request_state import NEVER, TOLERANCE, RequestState, RequestStatus, SLOState
from onbeat.scheduler.replica.scheduler import Scheduler
from onbeat.scheduler.replica.tracker import OUTPUT_WEIGHT


def begin_run(scheduler: Scheduler, scheduled: SchedulerOutput, token_id: int) -> SteadyRun | None:
    """Return the run that begins with a step that was just planned; None where it has no other step.

    Parameters
    ----------
    scheduler : its steps do not overlap.
    token_id : what every row samples; it ends no request.
    """
    shape = scheduled.shape
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
    states, steps = _rows_and_steps(scheduler.running, scheduler.kv)
    if model is not None or scheduler.table.makes_rows or scheduler.kv.num_tables > 1:
        steps = steps[0], 0  # each end is planned for
    return None if max(steps) <= 1 else SteadyRun(scheduler, scheduled, states, limit, steps, token_id)


def _rows_and_steps(
    running: Sequence[RequestState], kv: KVCacheManager
) -> tuple[list[RequestState], tuple[int, int]]:
    """Return the rows that sample, and how often they may before one ends or may lack a block, or the latter.

    Whoever waits could not be admitted, and while only token counts grow that stays so, up to the moment at
    which a new full block can be found in the prefix cache. A first token is a step of its own.

    Parameters
    ----------
    running : each has been advanced by the first of these tokens already.
    """
    states, max_steps, most = [], NEVER, NEVER
    block_size, has_names = kv.block_size, kv.enable_prefix_caching
    is_running = RequestStatus.RUNNING
    for state in running:
        if state.status is not is_running:  # a padding row runs its last token again and again
            continue
        states.append(state)
        num_tokens, num_computed = state.num_tokens, state.num_computed_tokens
        if num_tokens == state.num_prompt_tokens:
            return states, (1, 1)
        num_left = state.max_total_tokens - num_tokens
        if num_left < max_steps:
            max_steps = num_left
        if has_names:
            hashes = state.request.block_hashes
            if hashes is None or len(hashes) > (num_computed - 1) // block_size:
                most = min(most, 1 + -num_computed % block_size)
    if not states:
        return states, (1, 1)
    # Every row may be about to need a block, and then one more each block_size tokens.
    num_blocks_each = kv.pool.num_free_blocks // (len(states) * kv.num_tables)
    most = min(most, (num_blocks_each - 1) * block_size + 1)
    return states, (min(max_steps, most), most)


class SteadyRun:
    """A step in flight that is run again and again.

    `Scheduler.update` ends it with its last step, once `advance` was told of all before.

    Attributes
    ----------
    max_steps : how often it may be run before one of its requests ends, or it does.
    most : how often it may be run in all, without those who end; 0 where each end is planned for.
    carried : ends of steps that the device has run and the requests have not heard of, seconds.
    limit : seconds; only a step that is predicted to take no longer is planned once more. Where it is finite,
        `num_followed` is to be asked of each step but the last.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        scheduled: SchedulerOutput,
        states: list[RequestState],
        limit: float,
        steps: tuple[int, int],
        token_id: int,
    ) -> None:
        (self.max_steps, self.most), self.limit = steps, limit
        self._scheduler, self.scheduled = scheduler, scheduled
        self.carried: array[float] = array("d")
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

    def goes_on(self, num_steps: int) -> bool:
        """Return whether those who stay after so many steps more go on as they are: nobody waits for room."""
        waiting, kept = self._scheduler.waiting, self._scheduler.kv.pool.kept
        return len(self.carried) + num_steps < self.most and not (waiting.length or kept.ends)

    def let_end(self, ends: array[float], result: ModelRunnerOutput) -> Sequence[RequestOutput] | None:
        """Carry steps, and end the requests that have all their tokens; the others hear of them later.

        Parameters
        ----------
        ends : when each step ended, seconds; it `goes_on` after them.
        result : of the last.

        Returns
        -------
        The last outputs of those who end; None where all do, who are to be ended with their step.
        """
        scheduler, carried, shape = self._scheduler, self.carried, self.scheduled.shape
        num_known, num = len(carried), len(carried) + len(ends)
        carried += ends
        least, staying, ended = self.most, [], []
        for state in self._states:
            left = state.max_total_tokens - state.num_tokens
            if left > num:
                staying.append(state)
                least = left if left < least else least
            else:
                ended.append(state)
        self._give(self._states, (), num - max(num_known, 1))
        if not staying:
            return None
        self._states, self.max_steps = staying, least - num
        self._give(ended, carried[:-1], 0)
        gone = sum([state.num_computed_tokens + 1 for state in ended])
        shape.decode_context_tokens += len(ends) * self._num_rows - gone
        self._num_rows = num_rows = len(staying)
        shape.num_decodes = shape.num_new_tokens = shape.num_sequences = shape.num_lm_head_rows = num_rows
        step_id, _, rows, *others = scheduler.in_flight[0]
        last, planned = new_tuple(StepInFlight, (step_id, ended, rows, *others)), self.scheduled
        rows = rows[:num_rows]  # each is `DECODE`
        scheduler.in_flight[0] = new_tuple(StepInFlight, (step_id, staying, rows, *others))
        self.scheduled = new_tuple(SchedulerOutput, (step_id, rows, *planned[2:]))
        return scheduler.results.take(last, planned, result, carried[-1])

    def advance(self, ends: Sequence[float]) -> None:
        """Take the results of steps; the next one is under way.

        Parameters
        ----------
        ends : when each of them ended, seconds; at least one. Those carried come first.
        """
        num_steps, num_carried, scheduler = len(ends), len(self.carried), self._scheduler
        if (planner := scheduler.planner).model is None:
            planner.last_end = ends[-1]
        else:
            self.learn(ends)
        # Of those carried all but the last count as computed, and have their KV slots.
        self._give(self._states, ends, num_steps - max(num_carried - 1, 0))
        self.carried = array("d")
        shape, in_flight = self.scheduled.shape, scheduler.in_flight
        shape.decode_context_tokens += (num_steps - num_carried) * self._num_rows
        in_flight.num_planned += num_steps
        in_flight.last_plan = ends[-1]
        if scheduler.policy.slo is not None and scheduler.step_time_model is not None:
            in_flight.busy_until = ends[-1] + scheduler.step_time_model.step_time(shape)

    def _give(self, states: Sequence[RequestState], ends: Sequence[float], num_computed: int) -> None:
        """Give requests a token for each end, and KV slots for so many tokens that count as computed."""
        num_steps, token_ids = len(ends), [self._token_id] * len(ends)
        growing: list[RequestState] = []
        for state in states:
            state.num_computed_tokens += num_computed
            state.num_tokens += num_steps
            state.output_token_ids += token_ids
            if state.times is not None:
                state.times.extend(ends)
            if state.num_computed_tokens > state.num_allocated_tokens:
                growing.append(state)
        if growing:
            self._scheduler.kv.grow_each(growing)
        if self._scheduler.policy.known.keeps_deadlines and num_steps:
            self._note_deliveries(states, ends)

    def _note_deliveries(self, states: Sequence[RequestState], ends: Sequence[float]) -> None:
        """Hold deliveries against their deadlines; see `SLOTracker.on_deliveries`."""
        policy = self._scheduler.policy.slo
        tracker = None if policy is None else policy.tracker
        has_tenants = tracker is not None and tracker.tenants.are_several
        last = ends[-1]
        for state in states:
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
