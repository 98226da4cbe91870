"""What a replica tells of its load, for whoever shares requests out between replicas."""

from __future__ import annotations

from math import inf
from operator import itemgetter

from onbeat.core.fleet import MOST_BACKLOG_ENTRIES, ReplicaLoad
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import Policy
from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.request_table import RequestTable
from onbeat.scheduler.replica.slo.view import MOST_JOBS
from onbeat.scheduler.scheduler_config import SchedulerConfig
from onbeat.scheduler.triage import LEAST_SHARE, CostModel

Entry = tuple[float, float, int]
"""(when due, seconds of work, requests that wait for a slot)"""


class LoadReporter:
    """Sums up a replica's queues; changes nothing that plans depend on.

    Under a policy that goes by arrival no prompt has a deadline. What waits is before all that comes, so it
    is reported as due at once.

    Parameters
    ----------
    config, policy, table : of the scheduler.
    model : predicts steps; None where nobody does: work and costs are then not known.
    """

    def __init__(
        self, config: SchedulerConfig, policy: Policy, table: RequestTable, model: StepTimeModel | None
    ) -> None:
        self._table = table
        self._slo = policy.slo
        self._has_deadlines = policy.known.order is not None
        self._budget = config.max_num_batched_tokens
        self._cost_model: CostModel | None = None
        """What prompts cost now."""
        if policy.slo is not None:
            self._cost_model = policy.slo.cost_model
        elif model is not None:
            self._cost_model = CostModel(model, None)

    def take(self, now: float, *, num_taken: int, busy: float) -> ReplicaLoad:
        """Return how things stand.

        Parameters
        ----------
        num_taken : requests that came so far.
        busy : seconds until the step under way is expected to end.
        """
        cost_model, table = self._cost_model, self._table
        if cost_model is not None and self._slo is None:
            cost_model.count()
        running, waiting, kv = table.running, table.waiting, table.kv
        num_waiting = waiting.length
        num_free = kv.pool.num_free_blocks
        shortest = 0.0 if cost_model is None else cost_model.shortest_tbt
        num_decodes, num_context, tightest = self._in_lockstep(shortest)
        num_running = len(running) + num_decodes
        prefills: list[RequestState] = []
        for state in running:
            num_tokens = state.num_tokens
            if num_tokens >= state.pause_at:
                continue
            wanted = num_tokens + state.num_in_flight_tokens - state.num_computed_tokens
            num_computed = state.num_computed_tokens
            num_lacking = num_computed - state.num_allocated_tokens
            num_free -= -(-num_lacking // kv.block_size) if num_lacking > 0 else 0
            if wanted == 1:
                num_decodes += 1
                num_context += num_computed + 1
                slo = state.slo
                if shortest <= slo.tbt_objective < tightest and not slo.is_best_effort:
                    tightest = slo.tbt_objective
            elif wanted > 1:
                prefills.append(state)
        backlog: tuple[Entry, ...] = ((0.0, 0.0, num_waiting),) if num_waiting else ()
        best_effort, decode_seconds, full_seconds, share = 0.0, 0.0, 0.0, 1.0
        if cost_model is not None:
            if prefills or num_waiting:
                backlog, best_effort = self._prompts(cost_model, prefills, now, busy)
            # Of a step without decodes there is nothing to predict; that of one reads the weights as all do.
            decodes = BatchShape.of_decodes(max(num_decodes, 1), max(num_context, 1))
            decode_seconds = cost_model.of(decodes)
            streams = decodes if num_decodes else BatchShape()
            full_seconds, share = self._full_step(cost_model, streams, tightest)
        num_lacking, blocked = 0, ""
        if (head := waiting.peek()) is not None:
            num_lacking = max(0, kv.num_blocks_for(head.num_tokens - head.num_hit_tokens) - num_free)
            blocked = head.request_id if num_lacking else ""
        num_queued = waiting.ranked.num_tokens + waiting.best_effort.num_tokens
        return ReplicaLoad(
            time=now,
            num_taken=num_taken,
            busy=busy,
            num_running=num_running,
            num_waiting=num_waiting,
            num_kept_slots=table.num_slots_kept,
            num_free_blocks=num_free,
            num_wanted_blocks=num_lacking,
            blocked=blocked,
            num_queued_blocks=kv.num_blocks_for(num_queued, num_waiting),
            num_decodes=num_decodes,
            num_context_tokens=num_context,
            tightest_tbt=tightest,
            decode_seconds=decode_seconds,
            full_seconds=full_seconds,
            prefill_share=share,
            gives_up=self._slo is not None,
            backlog=backlog,
            best_effort_work=best_effort,
            costs=None if cost_model is None else cost_model.costs,
        )

    def _in_lockstep(self, shortest: float) -> tuple[int, int, float]:
        """Return how many streams are in lockstep, the tokens of their contexts, and their tightest TBT."""
        lockstep = self._table.lockstep
        if lockstep is None or not lockstep.num_rows:
            return 0, 0, inf
        tbts = [tbt for tbt, peers in lockstep.peers.items() if peers.states and tbt >= shortest]
        return lockstep.num_rows, lockstep.context, min(tbts, default=inf)

    def _prompts(
        self, cost_model: CostModel, prefills: list[RequestState], now: float, busy: float
    ) -> tuple[tuple[Entry, ...], float]:
        """Return the work of prompts with deadlines, and that of the others."""
        waiting = self._table.waiting
        best_effort = cost_model.of_sums(waiting.best_effort.num_tokens, waiting.best_effort.num_pairs)
        ranked = cost_model.of_sums(waiting.ranked.num_tokens, waiting.ranked.num_pairs)
        earliest = now + busy + cost_model.costs.step
        entries: list[Entry] = []
        for state in prefills:
            seconds = cost_model.seconds(state.num_wanted_tokens, state.num_computed_tokens)
            if not self._has_deadlines:
                ranked += seconds
            elif (due := state.slo.next_deadline) < inf and not (
                earliest + seconds > due and self._gives_up(state)
            ):
                entries.append((due - now, seconds, 0))
            else:
                best_effort += seconds
        if not self._has_deadlines:
            return ((0.0, ranked, len(waiting)),) if ranked else (), best_effort
        if ranked:
            queued, others = self._queued(cost_model, ranked, now, earliest)
            entries += _grouped(queued, max(1, MOST_BACKLOG_ENTRIES - len(entries)))
            best_effort += others
        entries.sort(key=itemgetter(0))  # equal ones in the order that plans have them in
        return tuple(_grouped(entries, MOST_BACKLOG_ENTRIES)), best_effort

    def _queued(
        self, cost_model: CostModel, ranked: float, now: float, earliest: float
    ) -> tuple[list[Entry], float]:
        """Return the waiting prompts with deadlines that can be met, and the work of the others.

        Those that no plan looks at yet count with the last.

        Parameters
        ----------
        ranked : seconds of all of them.
        earliest : when a prompt without any work would be done, seconds.
        """
        states = self._table.waiting.ranked.first(MOST_JOBS)
        token, pair = cost_model.costs.token, cost_model.costs.pair
        entries: list[Entry] = []
        left = ranked
        for state in states:
            num_tokens, num_pairs = state.queued_work
            # As plans reckon it, to the last bit: of equal prompts the same one has to be left behind.
            seconds = num_tokens * (token + pair * (num_pairs / num_tokens))
            deadline = state.sort_key[0]
            if earliest + seconds > deadline and self._gives_up(state):
                continue
            entries.append((deadline - now, seconds, 1))
            left -= seconds
        left = max(left, 0.0)
        if entries and len(states) == MOST_JOBS:
            until, seconds, num = entries[-1]
            num_beyond = self._table.waiting.ranked.num_requests - MOST_JOBS
            entries[-1] = (until, seconds + left, num + num_beyond)
            left = 0.0
        return entries, left

    def _gives_up(self, state: RequestState) -> bool:
        """Whether the policy gives a prompt up that cannot be in time."""
        return self._slo is not None and not state.is_protected

    def _full_step(self, cost_model: CostModel, decodes: BatchShape, tightest: float) -> tuple[float, float]:
        """Return the time of a step with prompts beside some decodes, and the share that these take."""
        num_decodes = decodes.num_decodes
        if self._slo is not None:
            prefill = cost_model.prefill_share(decodes, tightest * self._slo.rules.allowed, inf)
            return prefill.length, prefill.share
        seconds = cost_model.seconds(max(self._budget - num_decodes, 1), 0)
        length = seconds + cost_model.costs.step + num_decodes * cost_model.costs.decode
        return length, max(seconds / length, LEAST_SHARE) if length > 0 else 1.0


def _grouped(entries: list[Entry], most: int) -> list[Entry]:
    """Return entries, by deadline as they came, with neighbours added up until there are not too many.

    Each has the deadline of the last that is in it.
    """
    num_each = -(-len(entries) // most)
    if num_each <= 1:
        return entries
    groups = [entries[start : start + num_each] for start in range(0, len(entries), num_each)]
    return [
        (group[-1][0], sum([each[1] for each in group]), sum([each[2] for each in group])) for group in groups
    ]
