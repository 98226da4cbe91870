"""A policy after FastServe (arXiv 2305.05920, section 4): a skip-join multi-level feedback queue.

Requests with little service so far go first, and are preempted between any two tokens. The rules are those of
the paper and of its authors' code (`fastserve/scheduler.py` in LLMServe/FastServe). It departs from
them in these points:

- Nothing is swapped. A request that is passed over keeps its KV while there is room; where slots or blocks
  run out, the lowest queue is preempted first, and computes its tokens again later. Since that is work
  done twice, nobody is preempted a second time to let another in, only where running requests lack blocks.
- Requests without a row hold slots of `max_num_seqs`, too.
- Service is the predicted time of the steps that a request was in, and the first quantum is the predicted
  time of the shortest step, as in the paper (the code has 10 ms).
- Within a queue, the order is that of arrival (or of priority), also for those demoted or promoted.
- Starvation is looked for in each step, not in every thousandth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from benchmarks.policies.niyama import planned_shape
from benchmarks.policies.triaged import split_running
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.policies import Composition
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.step_plan import SPARE_SHARE, Composer, StepPlan, needs_block

QUANTUM_RATIO = 2.0
"""Of each queue's quantum to that of the queue above it."""
STARVATION = 3.0
"""Seconds without a step after which a request is promoted to the highest queue."""


@dataclass(frozen=True, slots=True)
class Job:
    """Where a request stands in the queues."""

    level: int
    """Its queue; 0 is the highest."""
    last_step: float
    """When it was last in a step, or came; seconds."""
    service: float = 0.0
    """Seconds that it has had in this queue."""


class FeedbackQueues:
    """The level of each request: entered by its first step's time, left by the service it has had."""

    def __init__(self, jobs: dict[str, Job] | None = None, quantum: float = 0.0) -> None:
        self.jobs = jobs or {}
        self._quantum = quantum

    def refreshed(self, states: Iterable[RequestState], now: float, model: StepTimeModel) -> FeedbackQueues:
        """Return the queues with new requests added, starving ones promoted, and ended ones removed."""
        queues = FeedbackQueues(quantum=self._quantum or _chunk_seconds(model, 1))
        for state in states:
            job = self.jobs.get(state.request_id)
            if job is None:
                job = Job(queues.entry_level(_chunk_seconds(model, state.num_tokens)), now)
            elif now - job.last_step >= STARVATION:
                job = replace(job, level=0, service=0.0)
            queues.jobs[state.request_id] = job
        return queues

    def quantum(self, level: int) -> float:
        """Return the service that a queue grants, seconds."""
        return self._quantum * QUANTUM_RATIO**level

    def entry_level(self, first_step_seconds: float) -> int:
        """Return the highest queue whose quantum is enough for a request's first step."""
        level = 0
        while self.quantum(level) < first_step_seconds:
            level += 1
        return level

    def charge(self, states: Iterable[RequestState], now: float, seconds: float) -> None:
        """Count a step for those in it; demote those that have used up their quantum."""
        for state in states:
            job = self.jobs[state.request_id]
            level, service = job.level, job.service + seconds
            if service > self.quantum(level):
                level, service = level + 1, 0.0
            self.jobs[state.request_id] = Job(level, now, service)

    def place(self, state: RequestState) -> tuple[int, tuple[float, ...]]:
        """Return the request's place in the order of service."""
        return self.jobs[state.request_id].level, state.sort_key


class FastServeComposer(Composer):
    """Runs the requests of the highest queues, their prompts whole, as far as a step reaches."""

    def __init__(self, model: StepTimeModel) -> None:
        self.queues = FeedbackQueues()
        self._model = model

    def compose(self, plan: StepPlan) -> None:
        queues = self.queues.refreshed((*plan.running, *plan.waiting), plan.now, self._model)
        _Step(plan, queues).fill()

    def commit(self, plan: StepPlan) -> None:
        """Count the step for those in it."""
        self.queues = self.queues.refreshed((*plan.running, *plan.waiting), plan.now, self._model)
        served = [*plan.decodes, *(state for state, _ in plan.chunks)]
        served += [admission.state for admission in plan.admissions]
        self.queues.charge(served, plan.now, self._model.step_time(planned_shape(plan)))


class _Step:
    """One step, filled from the highest queue down."""

    def __init__(self, plan: StepPlan, queues: FeedbackQueues) -> None:
        self._plan = plan
        self._queues = queues
        self._admits = True
        decodes, prefills = split_running(plan.running)
        self._parked = sorted([*decodes, *prefills], key=queues.place)
        """Running requests that have no row yet; the last one falls first."""

    def fill(self) -> None:
        plan = self._plan
        ready = [state for state in plan.waiting if not (state.num_in_flight_tokens or state.is_in_flight)]
        for state in sorted([*self._parked, *ready], key=self._queues.place):
            if plan.num_rows_left < 1 or plan.num_tokens_left < 1:
                return
            if state.status is RequestStatus.WAITING:
                # No other goes in before one that found no room.
                self._admits = self._admits and self._admit(state)
            elif state not in plan.victims and not self._continue(state):
                return

    def _continue(self, state: RequestState) -> bool:
        """Give a running request its tokens; False where they are too many for what is left of the step."""
        plan, num_new = self._plan, state.num_wanted_tokens
        if num_new > plan.num_tokens_left:
            return False
        self._parked.remove(state)
        if num_new > 1:
            plan.chunks.append((state, num_new))
        elif not needs_block(state) or self._take_block():
            plan.decodes.append(state)
        else:
            return True
        plan.num_tokens_left -= num_new
        return True

    def _take_block(self) -> bool:
        plan = self._plan
        while not plan.take_block():
            plan.ran_out_of_blocks = True
            if not self._parked or self._counts_on_cache:
                return False
            plan.preempt(self._parked.pop())
        return True

    def _admit(self, state: RequestState) -> bool:
        """Take a waiting request in, in place of lower queues' if need be; False where there is no room."""
        plan = self._plan
        if plan.ran_out_of_blocks or not self._make_room(state):
            return False
        cached_block_ids = plan.kv.match(state)
        num_cached = len(cached_block_ids) * plan.kv.block_size
        num_new = state.num_tokens - num_cached
        if num_new > plan.num_tokens_left:
            return False
        return plan.admit(state, cached_block_ids, num_new)

    def _make_room(self, state: RequestState) -> bool:
        """Preempt requests of lower queues until a new one finds a slot and blocks, if that is possible."""
        plan = self._plan
        level = self._queues.jobs[state.request_id].level
        num_needed = -(-state.num_tokens // plan.kv.block_size)
        num_needed += plan.kv.pool.num_blocks // SPARE_SHARE
        victims: list[RequestState] = []
        num_slots, num_blocks = plan.num_slots_left, plan.num_blocks_left
        for victim in () if self._counts_on_cache else reversed(self._parked):
            if num_slots > 0 and num_blocks >= num_needed:
                break
            if self._queues.jobs[victim.request_id].level <= level:
                break
            if victim.num_preemptions:
                continue
            victims.append(victim)
            num_slots += 1
            num_blocks += len(plan.kv.pool.exclusive_ids(victim.held_ids))
        if num_slots < 1:
            return False
        if num_blocks < num_needed:
            return not victims  # cached blocks may make up for what is missing
        for victim in victims:
            plan.preempt(victim)
            self._parked.remove(victim)
        return True

    @property
    def _counts_on_cache(self) -> bool:
        """Whether the plan admits someone with cached blocks, which a victim might be about to free."""
        return any(admission.cached_block_ids for admission in self._plan.admissions)


def _chunk_seconds(model: StepTimeModel, num_tokens: int) -> float:
    """Return the predicted time of a step with one prompt alone."""
    shape = BatchShape()
    shape.add(0, num_tokens, samples=True)
    return model.step_time(shape)


FASTSERVE = Composition(
    compose=lambda _config, model: FastServeComposer(model),
    whole_prompts=True,
    needs_step_time=True,
)
