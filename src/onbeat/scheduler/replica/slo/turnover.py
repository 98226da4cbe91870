"""When a prompt gets a slot and KV blocks on a full machine: as running requests end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from onbeat.scheduler.replica.request_state import RequestState
from onbeat.scheduler.replica.slo.filler import RESERVATION
from onbeat.scheduler.replica.slo.lengths import OutputLengths
from onbeat.scheduler.replica.slo.view import PromptJob, decode_shape
from onbeat.scheduler.replica.slo.work import PrefillWork
from onbeat.scheduler.replica.step_plan import StepPlan

_End = tuple[float, float, float]
"""When a request ends, or several for which one stands, in steps from now; the blocks that they had when that
was drawn; and when it was. To make one with named fields takes longer than the draw."""

NUM_ENDS = 64
"""That are waited for one by one. Of more, one stands for several: their number evens out what they are."""


class Turnover:
    """Predicts how long a prompt waits for its slot and its blocks.

    Free room goes to prompts in their order, then that of requests without objectives, which are preempted
    for it, then that of requests as they end. Where many are ahead, one request stands for several.

    Parameters
    ----------
    plan : the queues as they are.
    lengths : of answers of late.
    """

    def __init__(self, plan: StepPlan, work: PrefillWork, lengths: OutputLengths) -> None:
        self._plan = plan
        self._work = work
        self._lengths = lengths
        self._block_size = plan.block_size
        self._num_slots = plan.max_num_seqs - len(plan.running)
        self._num_blocks: float = plan.num_blocks_left - RESERVATION.num_spare_blocks(plan.num_blocks)
        self._passed = 0.0
        """Steps from now."""
        self._each = 1
        """Requests that one stands for."""
        self._ends: list[_End] = []
        """A heap."""

    def wait(self, own: RequestState, ahead: Sequence[PromptJob], start: float) -> float:
        """Return the seconds until a prompt with a deadline has its room; 0 where that is there.

        Parameters
        ----------
        ahead : waiting prompts that get theirs first, unless it comes too late for them.
        start : when the next step may start, seconds.
        """
        plan, size = self._plan, self._block_size
        wanted = [-(-job.state.queued_work[0] // size) for job in ahead]
        most = sum(wanted) + -(-own.num_tokens // size)
        if self._num_slots > len(ahead) and self._num_blocks >= most:
            return 0.0
        self._each = each = max(1, min(len(ahead), len(plan.running)) // NUM_ENDS)
        ahead, wanted = ahead[each // 2 :: each], wanted[each // 2 :: each]
        draws = self._look_at_running(ahead)
        step = self._work.of(decode_shape(plan.running))
        for job, num_blocks, num_left in zip(ahead, wanted, draws, strict=True):
            num_blocks *= each
            self._wait_for(num_blocks)
            passed = self._passed
            if passed and start + passed * step + job.seconds > job.deadline and not job.state.keeps_turn:
                continue
            self._num_slots -= each
            self._num_blocks -= num_blocks
            heappush(self._ends, (passed + num_left, num_blocks, passed))
        self._wait_for(plan.num_blocks_wanted(own, RESERVATION))
        return self._passed * step

    def _look_at_running(self, ahead: Sequence[PromptJob]) -> Iterator[int]:
        """Note when running requests end, and take those as gone that are preempted for prompts.

        Returns
        -------
        The tokens that each of those ahead will generate.
        """
        plan, each = self._plan, self._each
        staying = [state for state in plan.running if state.num_preemptions or state.slo.has_objective]
        num_held = sum([len(state.block_ids) for state in plan.running])
        # Of blocks that several share, each gives back its part.
        part = min((plan.num_blocks - plan.num_blocks_left) / max(num_held, 1), 1.0)
        self._num_slots += len(plan.running) - len(staying)
        self._num_blocks += part * (num_held - sum([len(state.block_ids) for state in staying]))
        sample = staying[each // 2 :: each]
        draws = self._lengths.spread([*sample, *[job.state for job in ahead]])
        self._ends = [
            (num_left, part * len(state.block_ids) * each, 0.0)
            for state, num_left in zip(sample, draws, strict=False)
        ]
        heapify(self._ends)
        return draws

    def _wait_for(self, num_blocks: float) -> None:
        """Let requests end until there is a slot, and so many blocks; or all have."""
        ends, each, block_size = self._ends, self._each, self._block_size
        while ends and (self._num_slots < 1 or self._num_blocks < num_blocks):
            passed, num_held, begun = heappop(ends)
            num_tokens = passed - begun - (passed - self._passed) * (len(ends) + 1)
            self._num_blocks += num_held + num_tokens * each / block_size
            self._num_slots += each
            self._passed = passed
