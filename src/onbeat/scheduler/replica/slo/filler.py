"""Puts rows into a step until its time is spent."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from typing import Protocol

from onbeat.core.step import BatchShape
from onbeat.scheduler.replica.memory_forecast import fits
from onbeat.scheduler.replica.parts import Reservation
from onbeat.scheduler.replica.request_state import RequestState, RequestStatus
from onbeat.scheduler.replica.slo.book import PromiseBook
from onbeat.scheduler.replica.slo.deadlines import BEST_EFFORT_RANK
from onbeat.scheduler.replica.slo.step_times import StepTimes
from onbeat.scheduler.replica.slo.tuning import SLOTuning
from onbeat.scheduler.replica.slo.victims import make_blocks_free
from onbeat.scheduler.replica.slo.view import decode_shape
from onbeat.scheduler.replica.step_plan import StepPlan

_LARGEST_TILE = 128
_TILES_A_CHUNK = 16
"""A chunk is rounded down to a power of two of at most this share of it: little is lost where the kernels'
tiles do not matter, and long chunks end at a tile's border where they do."""
_SLOTS_KEPT = 16
"""One in so many slots is kept from best effort, for those who are in a hurry."""
_ROOMY = 0.3
"""Share of free blocks above which nobody asks how long requests will go on."""


class FillerPolicy(Protocol):
    """What the filler needs of the policy."""

    tuning: SLOTuning
    book: PromiseBook
    reservation: Reservation


class StepFiller:
    """Adds decodes, then chunks, to a plan, and knows the time that the step takes so far.

    Attributes
    ----------
    shape : of the step so far.
    most_chunk_tokens : of all prompts together.
    """

    def __init__(self, plan: StepPlan, times: StepTimes, policy: FillerPolicy) -> None:
        self.shape = BatchShape()
        self._plan = plan
        self._times = times
        self._book = policy.book
        self._tuning = policy.tuning
        self._reservation = policy.reservation
        self._has_run: set[str] = set()
        # Beyond an efficient chunk a longer step gains nothing, and whoever arrives waits for its end.
        self.most_chunk_tokens = times.work.efficient_chunk
        self._is_blocked = False
        """Whether somebody waits for a slot or for memory."""
        self._rows: list[tuple[int, int]] | None = None

    @property
    def smallest_piece(self) -> int:
        """Tokens below which a piece of a prompt is not worth a place in a step."""
        return self._times.work.efficient_chunk // 4

    def decode(self, states: list[RequestState], shape: BatchShape) -> None:
        """Give each request one token; where blocks run short, preempt the cheapest."""
        plan = self._plan
        growing = [state for state in states if state.num_computed_tokens >= state.num_allocated_tokens]
        if len(growing) > plan.num_blocks_left:
            plan.ran_out_of_blocks = True
            states = make_blocks_free(plan, states, self._times, self._book)
            shape = decode_shape(states)
            growing = [state for state in states if state.num_computed_tokens >= state.num_allocated_tokens]
        for _ in growing:
            plan.take_block()
        plan.decodes += states
        plan.num_tokens_left -= len(states)
        self.shape = shape.copy()

    def fill(self, states: Iterable[RequestState], limit: float) -> bool:
        """Add as much of these prompts, in this order, as the time allows; return whether it is used up.

        Nobody overtakes one that waits for a slot or for memory, but who has both goes on.
        """
        for state in states:
            if state.request_id in self._has_run:
                continue
            if state.status is RequestStatus.WAITING:
                if self._is_blocked or not self._may_join(state):
                    self._is_blocked = True
                elif not self._admit(state, limit):
                    return True
            elif not self._continue(state, limit):
                return True
        return False

    def fill_for(self, states: list[RequestState], limit: float, seconds: float) -> float:
        """Add as much of the first prompt as so many seconds pay for; return the seconds spent."""
        before = self._times.of(self.shape)
        self.fill(states[:1], min(limit, before + seconds))
        return self._times.of(self.shape) - before

    def _continue(self, state: RequestState, limit: float) -> bool:
        plan = self._plan
        if state in plan.victims or plan.num_rows_left < 1:
            return True
        num_cached, num_wanted = state.num_computed_tokens, state.num_wanted_tokens
        num_new = self._chunk(num_cached, num_wanted, limit)
        if num_new == 0:
            return False
        plan.chunks.append((state, num_new))
        plan.num_tokens_left -= num_new
        self._add(state, num_cached, num_new)
        return num_new == num_wanted

    def _may_join(self, state: RequestState) -> bool:
        """Whether there is a slot for a waiting request, and memory until it ends."""
        plan = self._plan
        is_best_effort = state.sort_key[0] >= BEST_EFFORT_RANK
        num_kept = plan.max_num_seqs // _SLOTS_KEPT if is_best_effort else 0
        return (
            plan.num_slots_left > num_kept
            and not plan.ran_out_of_blocks
            and not state.num_in_flight_tokens
            and not state.is_in_flight
            and self._has_memory_for(state)
        )

    def _admit(self, state: RequestState, limit: float) -> bool:
        plan = self._plan
        cached_block_ids = plan.match(state)
        num_cached = len(cached_block_ids) * plan.block_size
        state.num_hit_tokens = num_cached
        num_wanted = state.num_tokens - num_cached
        num_new = 0 if state.num_external_tokens else self._chunk(num_cached, num_wanted, limit)
        if num_new == 0 and not state.num_external_tokens:
            return False
        if not plan.admit(state, cached_block_ids, num_new, self._reservation):
            self._is_blocked = True
            return True
        self._add(state, num_cached, num_new)
        self._note_memory(state)
        return num_new == num_wanted or num_new == 0

    def _add(self, state: RequestState, num_cached: int, num_new: int) -> None:
        self._has_run.add(state.request_id)
        if num_new:
            self.shape.add(num_cached, num_new, samples=True)

    def _chunk(self, num_cached: int, num_wanted: int, limit: float) -> int:
        """Return how much of a prompt fits."""
        num_chunk_tokens = self.shape.num_chunk_tokens
        most = min(num_wanted, self._plan.num_tokens_left, self.most_chunk_tokens - num_chunk_tokens)
        if most < 1:
            return 0
        if limit < inf:
            trial = self.shape.copy()
            trial.add(num_cached, most, samples=True)
            if self._times.of(trial) > limit:
                most = min(most, self._times.max_chunk(self.shape, num_cached, limit))
        return most if most == num_wanted else round_to_tile(most)

    # --- memory ---------------------------------------------------------------------------------------

    def _has_memory_for(self, state: RequestState) -> bool:
        """Whether the KV of all running requests still fits when they are at their longest together."""
        plan = self._plan
        if plan.num_blocks_left > _ROOMY * plan.num_blocks or not plan.running:
            return True
        if self._rows is None:
            self._rows = [self._row(other) for other in plan.running]
        capacity = plan.num_blocks * plan.block_size
        return fits(self._rows, self._row(state), capacity)

    def _note_memory(self, state: RequestState) -> None:
        if self._rows is not None:
            self._rows.append(self._row(state))

    def _row(self, state: RequestState) -> tuple[int, int]:
        """Return the KV slots that a request holds, in whole blocks and one to spare, and will still need."""
        size = self._plan.block_size
        limit = max(1, state.max_total_tokens - state.num_tokens)
        q = self._tuning.length_quantile
        remaining = limit
        if q is not None:
            remaining = self._book.lengths.remaining(
                state.request.slo_class, state.num_output_tokens, q=q, limit=limit
            )
        return -(-state.num_tokens // size) * size + size, remaining


def round_to_tile(num_tokens: int) -> int:
    """Round a chunk down to a multiple of a power of two, which is small beside it."""
    tile = _LARGEST_TILE
    while tile > 1 and tile * _TILES_A_CHUNK > num_tokens:
        tile //= 2
    return num_tokens - num_tokens % tile
