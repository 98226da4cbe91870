"""Which requests to preempt: for KV blocks of running ones, for slots and blocks that a prompt needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.filler import RESERVATION
from onbeat.scheduler.replica.slo.triage import Worth
from onbeat.scheduler.replica.slo.work import PrefillWork
from onbeat.scheduler.replica.step_plan import StepPlan, needs_block


class Victims:
    """Chooses requests to preempt, those first that lose least.

    A victim's tokens are computed again when it resumes (recompute preemption; KV is not moved to the host).
    Best effort goes first; then streams that have the time for that before their next deadline, the one with
    most to spare first; then those that are worth least.

    Parameters
    ----------
    plan : takes the preemptions.
    is_starved : whether best effort was preempted and has had no token for too long: it goes last.
    """

    def __init__(
        self,
        plan: StepPlan,
        work: PrefillWork,
        worth: Worth[RequestState],
        is_starved: Callable[[RequestState], bool],
    ) -> None:
        self._plan = plan
        self._work = work
        self._worth = worth
        self._is_starved = is_starved

    def make_blocks_free(self, rows: list[RequestState]) -> list[RequestState]:
        """Preempt until those of `rows` that are left can grow; return these.

        Those that the plan has given a row keep it. One request always stays, so that the batch never stops.
        """
        plan = self._plan
        planned = {id(state) for state in (*plan.victims, *plan.decodes)}
        pool = [state for state in plan.running if id(state) not in planned and not state.is_in_flight]
        pool.sort(key=self._loss)
        num_growing = sum(map(needs_block, rows))
        gone: set[int] = set()
        while len(pool) > 1 and num_growing > plan.num_blocks_left:
            victim = pool.pop()
            plan.preempt(victim)
            gone.add(id(victim))
            num_growing = sum(needs_block(state) for state in rows if id(state) not in gone)
        rows = [state for state in rows if id(state) not in gone]
        num_over = num_growing - plan.num_blocks_left
        if num_over > 0:  # no others can be preempted: some wait for a block
            waits = {id(state) for state in sorted(filter(needs_block, rows), key=self._loss)[-num_over:]}
            rows = [state for state in rows if id(state) not in waits]
        return rows

    def make_room(self, prompt: RequestState, pool: Iterable[RequestState]) -> bool:
        """Preempt requests of a pool until a waiting one has its slot and its blocks; none in vain.

        Returns whether that is so.
        """
        plan = self._plan
        pool = [state for state in pool if not state.is_in_flight]
        if not pool or not plan.has_blocks_for(prompt, RESERVATION, without=pool):
            return False
        pool.sort(key=self._loss)
        while plan.num_slots_left < 1 or not plan.has_blocks_for(prompt, RESERVATION):
            if not pool:
                return False
            plan.preempt(pool.pop())
        return True

    def _loss(self, state: RequestState) -> tuple[float, ...]:
        """Return a key: the greatest is the first to be preempted."""
        slo, arrival = state.slo, state.request.arrival
        if slo.runs_as_best_effort:
            return (-1.0 if self._is_starved(state) else 2.0, 0.0, arrival)
        due = slo.due(state.num_certain_tokens, self._plan.now)
        slack = due - self._plan.now - self._work.idle_seconds(state.num_tokens, 0)
        return (1.0, slack, arrival) if slack >= 0 else (0.0, -self._worth(state), arrival)
