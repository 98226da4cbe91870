"""In which order a policy fills a step."""

from __future__ import annotations

from math import inf
from typing import Protocol

from onbeat.scheduler.replica.parts import Chunking, QueueOrder, Reservation
from onbeat.scheduler.replica.queues import RunningList, WaitingQueue
from onbeat.scheduler.replica.step_plan import StepPlan


class Composer(Protocol):
    """Fills the plan of one step by calling its verbs."""

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:
        """Fill a plan; nothing else may change, since a plan may never be carried out."""
        ...

    def commit(self, plan: StepPlan) -> None:
        """Remember what the composer needs of a plan that is carried out."""
        ...


class DecodesFirst:
    """Decodes, then prompts that have begun, then new ones: no decode ever waits for a prompt.

    With `ChunkedPrompts` this is Sarathi-Serve's stall-free batching (OSDI 2024, section 4.2); with
    `WholePrompts` it is Orca's iteration-level scheduling (OSDI 2022, algorithm 1), whose batches mix whole
    prompts with decodes.
    """

    def __init__(self, chunking: Chunking, reservation: Reservation) -> None:
        self._chunking = chunking
        self._reservation = reservation

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:
        plan.preempt_for_waiting(order, self._reservation)
        plan.decode_running()
        plan.continue_prefills(self._chunking)
        plan.admit_waiting(self._chunking, self._reservation)

    def commit(self, plan: StepPlan) -> None:
        """Remember nothing."""

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return infinity: whoever waits could not be admitted. See `steady.Steady`."""
        return inf


class PrefillsFirst:
    """A step of new prompts alone if any fits, else a step of decodes (vLLM, SOSP 2023).

    Departs from vLLM in one point: after `max_prefill_steps` prompt steps in a row the decodes get one, since
    otherwise an endless stream of short requests could starve those that are generating.
    """

    def __init__(self, chunking: Chunking, reservation: Reservation, *, max_prefill_steps: int = 32) -> None:
        self._chunking = chunking
        self._reservation = reservation
        self._max_prefill_steps = max_prefill_steps
        self._num_prefill_steps = 0
        self._is_turn_of_prompts = False
        """Whether the last step was one that prompts had to leave to decodes."""

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:
        plan.preempt_for_waiting(order, self._reservation)
        if self._num_prefill_steps >= self._max_prefill_steps:
            plan.decode_running()
            if not plan.is_empty:
                return
        plan.continue_prefills(self._chunking)
        plan.admit_waiting(self._chunking, self._reservation)
        if plan.is_empty:
            plan.decode_running()

    def commit(self, plan: StepPlan) -> None:
        """Count steps of prompts in a row."""
        has_prompts = bool(plan.chunks or plan.admissions)
        self._is_turn_of_prompts = not has_prompts and self._num_prefill_steps >= self._max_prefill_steps
        self._num_prefill_steps = self._num_prefill_steps + 1 if has_prompts else 0

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return infinity unless prompts have their turn next. See `steady.Steady`."""
        return 0.0 if self._is_turn_of_prompts else inf


class BatchAtATime:
    """Request-level batching: a batch is formed, runs until its last request has finished, then the next.

    The prompts of a batch may take several steps (each within the token budget); the first decode step closes
    the batch. Finished requests stay as padding rows (`ReleaseWithBatch`), which is what request-level
    batching costs.
    """

    def __init__(self, chunking: Chunking, reservation: Reservation) -> None:
        self._chunking = chunking
        self._reservation = reservation

    def compose(self, plan: StepPlan, order: QueueOrder) -> None:  # noqa: ARG002 (a batch is never broken up)
        is_open = all(state.num_delivered_tokens <= 1 for state in plan.running)
        if is_open:
            plan.admit_waiting(self._chunking, self._reservation)
        if plan.is_empty:
            plan.decode_running()

    def commit(self, plan: StepPlan) -> None:
        """Remember nothing."""

    def steady_limit(self, running: RunningList, waiting: WaitingQueue) -> float:  # noqa: ARG002
        """Return infinity: whoever waits could not be admitted. See `steady.Steady`."""
        return inf
