"""When a prompt gets a slot and KV blocks on a full machine: as running requests end."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.filler import RESERVATION
from onbeat.scheduler.replica.slo.lengths import OutputLengths
from onbeat.scheduler.replica.slo.view import PromptJob, decode_shape, may_be_given_up
from onbeat.scheduler.replica.slo.work import PrefillWork
from onbeat.scheduler.replica.step_plan import StepPlan

_GOLDEN = (5**0.5 - 1) / 2
"""Its multiples spread evenly over the unit interval, however many of them there are."""


class Turnover:
    """Predicts how long a prompt waits for its slot and its blocks.

    Free room goes to prompts in their order, then that of requests without objectives, which are preempted
    for it, then that of requests as they end. Of those some end sooner than is usual at their age and some
    later: each has another quantile of its remaining tokens, and the quantiles are spread evenly. So the k-th
    end comes about when it does in the median, and lengths that are known are taken as they are.

    Parameters
    ----------
    plan : the queues as they are.
    lengths : of answers of late.
    """

    def __init__(self, plan: StepPlan, work: PrefillWork, lengths: OutputLengths) -> None:
        self._plan = plan
        self._work = work
        self._lengths = lengths
        self._num_slots = plan.max_num_seqs - len(plan.running)
        self._num_blocks: float = plan.num_blocks_left - RESERVATION.num_spare_blocks(plan.num_blocks)
        self._passed = 0.0
        """Steps from now."""
        self._ends: list[_End] = []
        """A heap."""
        self._num_drawn = 0

    def wait(self, own: RequestState, ahead: Sequence[PromptJob], start: float) -> float:
        """Return the seconds until a prompt with a deadline has its room; 0 where that is there.

        Parameters
        ----------
        ahead : waiting prompts that get theirs first, unless it comes too late for them.
        start : when the next step may start, seconds.
        """
        plan, size = self._plan, self._plan.block_size
        wanted = [-(-job.state.queued_work[0] // size) for job in ahead]
        most = sum(wanted) + -(-own.num_tokens // size)
        if self._num_slots > len(ahead) and self._num_blocks >= most:
            return 0.0
        self._look_at_running()
        step = self._work.of(decode_shape(plan.running))
        for job, num_blocks in zip(ahead, wanted, strict=True):
            self._wait_for(num_blocks)
            begins = start + self._passed * step
            if self._passed and begins + job.seconds > job.deadline and may_be_given_up(job.state):
                continue
            self._num_slots -= 1
            self._num_blocks -= num_blocks
            heappush(self._ends, self._end_of(job.state, num_blocks))
        self._wait_for(plan.num_blocks_wanted(own, RESERVATION))
        return self._passed * step

    def _look_at_running(self) -> None:
        """Draw when running requests end, and take those as gone that are preempted for prompts."""
        plan = self._plan
        num_held = sum([len(state.block_ids) for state in plan.running])
        # Of blocks that several share, each gives back its part.
        part = min((plan.num_blocks - plan.num_blocks_left) / max(num_held, 1), 1.0)
        for state in plan.running:
            num_blocks = part * len(state.block_ids)
            if state.slo.has_objective or state.num_preemptions:
                self._ends.append(self._end_of(state, num_blocks))
            else:
                self._num_slots += 1
                self._num_blocks += num_blocks
        heapify(self._ends)

    def _end_of(self, state: RequestState, num_blocks: float) -> _End:
        """Draw when a request ends that runs, or begins to."""
        quantile = (0.5 + self._num_drawn * _GOLDEN) % 1.0
        self._num_drawn += 1
        num_left = self._lengths.remaining(
            state.request.slo_class,
            state.num_output_tokens,
            q=quantile,
            limit=state.max_total_tokens - state.num_tokens,
        )
        return _End(self._passed + num_left, self._num_drawn, num_blocks, self._passed)

    def _wait_for(self, num_blocks: float) -> None:
        """Let requests end until there is a slot, and so many blocks; or all have."""
        while self._ends and (self._num_slots < 1 or self._num_blocks < num_blocks):
            end = heappop(self._ends)
            num_tokens = (end.passed - self._passed) * (len(self._ends) + 1)
            num_back = end.num_blocks + (end.passed - end.begun) / self._plan.block_size
            self._num_blocks += num_back - num_tokens / self._plan.block_size
            self._num_slots += 1
            self._passed = end.passed


class _End(NamedTuple):
    """When a request ends, and what it gives back."""

    passed: float
    """Steps from now."""
    number: int
    """Of equal ones the first drawn is the first."""
    num_blocks: float
    """That it had when it was drawn."""
    begun: float
    """When that was, steps from now."""
