"""Puts rows into a step until its time is spent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.scheduler.replica.parts import Reservation
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.prefill_work import PrefillWork
from onbeat.scheduler.replica.slo.view import decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan

_LARGEST_TILE = 128
_TILES_A_CHUNK = 16
"""A chunk is rounded down to a power of two of at most this share of it: little is lost where the kernels'
tiles do not matter, and long chunks end at a tile's border where they do."""


class StepFiller:
    """Adds decodes, then chunks, to a plan, and knows the time that the step takes so far.

    Attributes
    ----------
    shape : of the step so far.
    """

    def __init__(
        self,
        plan: StepPlan,
        model: StepTimeModel,
        work: PrefillWork,
        quantile: float | None,
        reservation: Reservation,
    ) -> None:
        self.shape = BatchShape()
        self._plan = plan
        self._model = model
        self._work = work
        self._q = quantile
        self._reservation = reservation
        self._has_run: set[str] = set()

    def decode(self, states: list[RequestState], shape: BatchShape) -> None:
        """Give each request one token; where blocks run short, preempt those with the most time."""
        plan = self._plan
        growing = [state for state in states if state.num_computed_tokens >= state.num_allocated_tokens]
        missing = len(growing) - plan.num_blocks_left
        if missing > 0:
            plan.ran_out_of_blocks = True
            states = self._without_victims(states)
            growing = [state for state in states if state.num_computed_tokens >= state.num_allocated_tokens]
            shape = decode_shape(states)
        for _ in growing:
            plan.take_block()
        plan.decodes += states
        plan.num_tokens_left -= len(states)
        self.shape = replace(shape)

    def _without_victims(self, states: list[RequestState]) -> list[RequestState]:
        """Preempt requests until the others can grow."""
        plan = self._plan
        candidates = sorted(
            (state for state in plan.running if not state.is_in_flight and not state.num_in_flight_tokens),
            key=lambda state: (state.is_best_effort, state.next_deadline, state.sort_key),
        )
        kept = list(states)
        while candidates:
            num_growing = sum(state.num_computed_tokens >= state.num_allocated_tokens for state in kept)
            if num_growing <= plan.num_blocks_left or len(candidates) == 1:
                break
            victim = candidates.pop()
            plan.preempt(victim)
            kept = [state for state in kept if state is not victim]
        return kept

    def fill(self, states: Iterable[RequestState], limit: float) -> bool:
        """Add as much of these prompts, in this order, as the time allows; return whether it is used up."""
        for state in states:
            if state.request_id in self._has_run:
                continue
            if state.status is RequestStatus.WAITING:
                outcome = self._admit(state, limit)
            else:
                outcome = self._continue(state, limit)
            if outcome is False:
                return True
        return False

    def fill_for(self, states: list[RequestState], limit: float, seconds: float) -> float:
        """Add as much of the first prompts as so many seconds pay for; return the seconds spent."""
        before = self._model.step_time(self.shape, self._q)
        if before + seconds > limit:
            return 0.0
        self.fill(states[:1], before + seconds)
        return self._model.step_time(self.shape, self._q) - before

    def _continue(self, state: RequestState, limit: float) -> bool:
        if state in self._plan.victims:
            return True
        num_cached, num_wanted = state.num_computed_tokens, state.num_wanted_tokens
        num_new = self._chunk(num_cached, num_wanted, limit)
        if num_new == 0:
            return False
        self._plan.chunks.append((state, num_new))
        self._plan.num_tokens_left -= num_new
        self._add(state, num_cached, num_new)
        return num_new == num_wanted

    def _admit(self, state: RequestState, limit: float) -> bool:
        plan = self._plan
        if state.num_in_flight_tokens or state.is_in_flight:
            return True
        # Best effort leaves some slots to those who are in a hurry.
        num_kept_free = plan.max_num_seqs // 16 if state.sort_key[0] >= BEST_EFFORT_RANK else 0
        if plan.num_slots_left <= num_kept_free or plan.ran_out_of_blocks:
            return False
        cached_block_ids = plan.match(state)
        num_cached = len(cached_block_ids) * plan.block_size
        state.num_hit_tokens = num_cached
        num_wanted = state.num_tokens - num_cached
        num_new = 0 if state.num_external_tokens else self._chunk(num_cached, num_wanted, limit)
        if num_new == 0 and not state.num_external_tokens:
            return False
        if not plan.admit(state, cached_block_ids, num_new, self._reservation):
            return False
        self._add(state, num_cached, num_new)
        return num_new == num_wanted

    def _add(self, state: RequestState, num_cached: int, num_new: int) -> None:
        self._has_run.add(state.request_id)
        if num_new:
            self.shape.add(num_cached, num_new, samples=True)

    def _chunk(self, num_cached: int, num_wanted: int, limit: float) -> int:
        """Return how much of a prompt fits."""
        num_left = self._plan.num_tokens_left
        if num_left < 1:
            return 0
        most = min(num_wanted, num_left, self._largest())
        if most < 1:
            return 0
        if limit == inf:
            return most if most == num_wanted else round_to_tile(most)
        trial = replace(self.shape)
        trial.add(num_cached, most, samples=True)
        if self._model.step_time(trial, self._q) <= limit:
            return most if most == num_wanted else round_to_tile(most)
        fitting = self._model.max_chunk_tokens(self.shape, num_cached, limit, self._q)
        return round_to_tile(min(fitting, most))

    def _largest(self) -> int:
        """Return the tokens of prompts after which longer steps gain nothing."""
        num_chunk_tokens = self.shape.num_new_tokens - self.shape.num_decodes
        return self._work.efficient_chunk - num_chunk_tokens


def round_to_tile(num_tokens: int) -> int:
    """Round a chunk down to a multiple of a power of two, which is small beside it."""
    tile = _LARGEST_TILE
    while tile > 1 and tile * _TILES_A_CHUNK > num_tokens:
        tile //= 2
    return num_tokens - num_tokens % tile
