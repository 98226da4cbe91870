"""The requests of a replica as the planner of a step sees them, and what puts prompts into the step.

A step gets prompts until its time is spent. For them requests are taken out of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import itemgetter

from onbeat.core.step import BatchShape, new_tuple
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.step_plan import StepPlan, needs_block
from onbeat.scheduler.triage import CostModel, DueWork

MOST_JOBS = 128
"""Waiting prompts with deadlines that a plan looks at, those that are due first: a plan takes the same time
however many wait behind them."""
PromptJob = DueWork[RequestState]
"""A prompt that runs or waits on a replica."""
Jobs = list[PromptJob]
"""By deadline."""
_DEADLINE = itemgetter(0)
"""Of a job, without a call."""


class RunningView:
    """Running requests by what they want: one token each, or tokens of a prompt.

    Parameters
    ----------
    running : all of them.
    start : when the step to plan starts, seconds.
    shortest : of a step with a token, seconds. A TBT objective below it no step can keep, whatever is left
        out of it, so that it binds none: others would wait for nothing.

    Attributes
    ----------
    streams : requests that want one token and have a deadline for it.
    deadlines : that deadline of each stream.
    best_effort_decodes : requests that want one token and have none: no objective, one that was missed, or
        one that cannot be kept.
    decodes : both, or what `keep` has left of them.
    shape : of a step of these alone.
    num_growing : of these, those whose next token has no slot yet.
    prefills : requests in the middle of their prompt.
    deadline : the earliest of `streams` with a TBT objective, even a passed one; infinite without any.
    urgent : the stream that is due first, by its pace or its objective.
    tightest : the shortest TBT objective of `streams` that a step can keep; infinite without any.
    paces : the times between tokens that e2e objectives ask for, and TBT objectives do not.
    """

    def __init__(self, running: Iterable[RequestState], start: float, shortest: float) -> None:
        self.streams: list[RequestState] = []
        self.deadlines: list[float] = []
        self.best_effort_decodes: list[RequestState] = []
        self.prefills: list[RequestState] = []
        self.paces: list[float] = []
        self.urgent: RequestState | None = None
        streams, deadlines, best_effort_decodes = self.streams, self.deadlines, self.best_effort_decodes
        earliest = tightest = first = inf
        context = num_guided = num_growing = 0
        for state in running:
            num_in_flight = state.num_in_flight_tokens
            num_tokens = state.num_tokens + num_in_flight
            is_full = num_in_flight and num_tokens >= state.max_total_tokens
            if is_full or num_tokens >= state.pause_at or state.is_in_flight or state.sits_out:
                continue  # full with what is in flight, paused, held, or not its turn
            num_computed = state.num_computed_tokens
            wanted = num_tokens - num_computed
            if wanted != 1:
                if wanted > 1:
                    self.prefills.append(state)
                continue
            context += num_computed + 1
            num_guided += state.is_guided
            num_growing += num_computed >= state.num_allocated_tokens
            slo = state.slo
            deadline = slo.next_deadline
            if num_in_flight:
                deadline = slo.deadline_after(num_in_flight - state.num_in_flight_drafts, start)
            objective = slo.tbt_objective
            if deadline == inf or (objective < shortest and slo.tbt == objective):
                best_effort_decodes.append(state)
                continue
            streams.append(state)
            deadlines.append(deadline)
            if deadline < first:
                first, self.urgent = deadline, state
            earliest = deadline if deadline < earliest and objective < inf else earliest
            if slo.tbt < objective:
                self.paces.append(slo.tbt)
            if shortest <= objective < tightest:
                tightest = objective
        self.deadline, self.tightest = earliest, tightest
        self.decodes, self.num_growing = streams + best_effort_decodes, num_growing
        self.shape = BatchShape.of_decodes(len(self.decodes), context, num_guided)

    def keep(self, decodes: list[RequestState]) -> None:
        """Let the step have these decodes alone."""
        self.decodes, self.shape = decodes, decode_shape(decodes)
        self.num_growing = sum(map(needs_block, decodes))

    @property
    def has_lost_job(self) -> bool:
        """Whether a stream runs that has missed its e2e objective, and that another request goes on from."""
        lost = (state for state in self.best_effort_decodes if state.slo.is_best_effort)
        return any(state.slo.end < inf and state.request.kept_for > 0 for state in lost)


def decode_shape(states: Collection[RequestState]) -> BatchShape:
    """Return the shape of a step with one token for each."""
    context = sum([state.num_computed_tokens + 1 for state in states])
    return BatchShape.of_decodes(len(states), context, sum([state.is_guided for state in states]))


def prefill_jobs(
    plan: StepPlan, now: float, prefills: Sequence[RequestState], cost_model: CostModel
) -> tuple[Jobs, list[RequestState]]:
    """Return the prompts with deadlines in their order, and those that cannot be in time any more.

    A prompt is late for certain once not even an idle machine would be in time, which counts what others have
    left in the prefix cache since it arrived. One that is protected is not given up.

    Parameters
    ----------
    plan : knows who waits, and what the prefix cache holds; it remembers what was found.
    now : when the step to plan starts, seconds.
    prefills : running requests in the middle of their prompts.
    """
    jobs: Jobs = []
    late: list[RequestState] = []
    token, pair = cost_model.costs.token, cost_model.costs.pair
    earliest = now + cost_model.costs.step
    states = [state for state in prefills if state.slo.next_deadline < inf]
    states += plan.waiting.ranked.first(MOST_JOBS)
    for state in states:
        num_cached = state.num_computed_tokens or state.num_hit_tokens
        num_tokens = state.num_tokens + state.num_in_flight_tokens - num_cached
        seconds = num_tokens * (token + pair * (num_cached + 0.5 * num_tokens))
        deadline = state.slo.next_deadline
        if earliest + seconds > deadline and not state.is_protected:
            num_found = 0 if state.block_ids else len(plan.kv.match(state)) * plan.kv.block_size
            if num_found > num_cached:
                plan.num_hit_tokens[state.request_id] = num_found
                seconds = cost_model.seconds(state.num_tokens - num_found, num_found)
            if num_found <= num_cached or earliest + seconds > deadline:
                late.append(state)
                continue
        jobs.append(new_tuple(DueWork, (deadline, seconds, state)))
    # A stream that was preempted with a token in flight stands in the queue by the deadline of that.
    jobs.sort(key=_DEADLINE)
    return jobs, late


@dataclass(slots=True)
class StepFiller:
    """Adds chunks to a plan that has its decodes, and knows the time that the step takes so far.

    Parameters
    ----------
    shape : the decodes; then with what was added.
    limit : seconds that the step may take.
    num_left : tokens that all prompts together may have still, of those that the plan has left.
    ends_by : request id -> seconds after which a step that ends this prompt is too long for it.
    due : the first of these of prompts that the step ends.
    is_blocked : whether a prompt waits for a slot or for memory.
    """

    plan: StepPlan
    cost_model: CostModel
    shape: BatchShape
    limit: float
    num_left: int
    ends_by: Mapping[str, float]
    due: float = inf
    is_blocked: bool = False

    def fill(self, states: Iterable[RequestState]) -> bool:
        """Add as much of these prompts, in this order, as fits; return whether there is room for others.

        No prompt overtakes one that waits for a slot or for memory, but one that has both goes on. Those that
        the plan preempts get nothing.
        """
        plan, victims = self.plan, self.plan.victims
        for state in states:
            is_waiting = state.status is RequestStatus.WAITING
            if (is_waiting and self.is_blocked) or (victims and state in victims):
                continue
            if self.num_left < 1 or plan.num_rows_left < 1:
                return False
            if is_waiting and (
                plan.ran_out_of_blocks
                or plan.num_slots_left <= 0
                # A preempted request may still be in a step in flight; its turn comes when that is back.
                or state.num_in_flight_tokens
                or state.is_in_flight
            ):
                self.is_blocked = True
            elif not self._add(state, is_waiting=is_waiting):
                return False
        return True

    def leave_margin(self) -> None:
        """Let what follows make no prompt late that the step ends, even if the step takes long.

        It is for those who have no deadline that can be met: they lose nothing by the next step.
        """
        if self.due < inf and (certain := self.due / self.cost_model.spread) < self.limit:
            self.limit = min(self.limit, max(certain, self.cost_model.of(self.shape)))

    def _add(self, state: RequestState, *, is_waiting: bool) -> bool:
        """Add a chunk of a prompt, which is taken in if it waits; False where the time is used up."""
        plan, num_cached = self.plan, state.num_computed_tokens
        cached_block_ids: list[int] = []
        if is_waiting:
            cached_block_ids = plan.kv.match(state)
            num_cached = len(cached_block_ids) * plan.kv.block_size
            plan.num_hit_tokens[state.request_id] = num_cached
        num_wanted = state.num_tokens + state.num_in_flight_tokens - num_cached
        num_new, scores = min(num_wanted, self.num_left), state.scores_prompt
        shape, limit, cost_model = self.shape.copy(), self.limit, self.cost_model
        shape.add(num_cached, num_new, samples=num_new if scores else 1)
        if limit < inf and cost_model.of(shape) > limit:
            num_new = min(num_new, cost_model.max_chunk(self.shape, num_cached, limit, scores=scores))
            if num_new == 0:
                return False
            shape = self.shape.copy()
            shape.add(num_cached, num_new, samples=num_new if scores else 1)
        if not is_waiting:
            plan.chunks.append((state, num_new))
            plan.num_tokens_left -= num_new
        elif not plan.admit(state, cached_block_ids, num_new):
            self.is_blocked = True
            return True
        self.shape = shape
        self.num_left -= num_new
        if num_cached + num_new == state.num_tokens:
            # Its token comes with the step's end: what else goes into the step must not make it late.
            ends_by = self.ends_by.get(state.request_id, inf)
            self.due = min(self.due, ends_by)
            if ends_by < self.limit:
                self.limit = max(ends_by, cost_model.of(shape))
        return num_new == num_wanted


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
    while len(pool) > 1 and plan.num_growing(rows) > plan.num_blocks_left:
        victim = pool.pop()
        plan.preempt(victim)
        rows = [state for state in rows if state is not victim]
    num_over = -(-(plan.num_growing(rows) - plan.num_blocks_left) // plan.kv.num_tables)
    if num_over > 0:  # no others can be preempted: some wait for a block
        waits = {id(state) for state in sorted(filter(needs_block, rows), key=loss)[-num_over:]}
        rows = [state for state in rows if id(state) not in waits]
    return rows


def is_expendable(state: RequestState) -> bool:
    """Whether a request has begun, has no objective, and was never preempted."""
    return bool(state.block_ids) and not (state.num_preemptions or state.slo.has_objective)


def preempt_for(plan: StepPlan, prompt: RequestState, pool: Iterable[RequestState], loss: Loss) -> None:
    """Preempt requests of a pool until a waiting one has its slot and its blocks; none in vain."""
    pool = sorted([state for state in pool if not state.is_in_flight], key=loss)
    if pool and plan.has_blocks_for(prompt, without=pool):
        while pool and (plan.num_slots_left < 1 or not plan.has_blocks_for(prompt)):
            plan.preempt(pool.pop())
