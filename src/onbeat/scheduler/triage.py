"""What prompts cost, which can be in time, and when one has its first token: for a replica and for a router.

Costs are coefficients of the step-time model, so that a queue is summed up quickly.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import ceil, exp, inf, sqrt
from typing import Generic, NamedTuple, TypeVar

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import USUAL_CONTEXT, PrefillCosts
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel

StateT = TypeVar("StateT")

LEAST_SHARE = 0.05
"""Share of the time that prompts are counted on to get, however little is left beside the decodes: without a
bound the predicted wait would be infinite."""
_MEMORY_SECONDS = 10.0
"""Time constant of the pace at which requests end."""
_MEDIAN_SOONER = 1 / 3
"""Of mean gaps, how much sooner than the mean the median of events at random is: see `capacity_wait`."""

_NEAR_BEST = 1.05
"""A chunk is large enough if no other is cheaper a token by more than this."""
_REFRESH_STEPS = 16
"""Steps after which the coefficients are taken again from a model that has learnt meanwhile: some 15
questions, which take a few per cent of the time that these steps are planned in."""
CERTAIN = 0.99
"""Quantile of what a step is certain to take no longer than: one token in a hundred may be late."""


class PrefillShare(NamedTuple):
    """What prompts get of a step."""

    chunk: int
    """Tokens of all prompts together, beyond which a longer step gains nothing."""
    length: float
    """Seconds of the step with as many."""
    share: float
    """Of the time that goes into prefill work, in (0, 1]."""

    @property
    def fixed_seconds(self) -> float:
        """Seconds of the step that do not go into prefill work.

        Work w takes ceil(w / (share length)) steps, each with this time beside it. Where the last is ended
        for it, it is done after w / share + `fixed_seconds` at the latest.
        """
        return self.length * (1 - self.share)


class CostModel:
    """Seconds of prefill work: `token n + pair (n h + n^2 / 2)` for n tokens after h cached ones.

    This is what a prompt adds to steps that are long enough to be bound by arithmetic, beside
    `costs.step` for each step.

    Parameters
    ----------
    model, quantile : predicts steps; the quantile to plan with, None is the mean.
    most_step_tokens : that a step may have; infinite where time alone bounds it.

    Attributes
    ----------
    of : returns the time of a step, seconds.
    costs : the coefficients, of which `step` is what a step takes beside its tokens.
    seconds : returns the work of so many tokens after so many cached ones.
    efficient_chunk : the shortest chunk at which a token costs next to the least; longer ones gain nothing.
    alone_seconds : of a step of one decode of a usual context; no step with a token takes less.
    least_tbt : the shortest TBT objective that is worth keeping, seconds; 0 where all are (`ShortSteps`).
    shortest_tbt : the shortest that binds steps, as it can be kept, too.
    slowdown : how many times as long such a step takes as it once did, as far as the model knew then.
    num_left : steps until the coefficients are taken again.
    """

    def __init__(self, model: StepTimeModel, quantile: float | None, most_step_tokens: float = inf) -> None:
        self._model = model
        self.of = partial(model.step_time, q=quantile)
        self._quantile = quantile
        self._most_step_tokens = most_step_tokens
        self._least_alone = inf
        self.least_tbt = 0.0
        self.take()

    def count(self, num_steps: int = 1) -> None:
        """Count steps, at most `num_left`; take the coefficients from the model, if it is time."""
        self.num_left -= num_steps
        if not self.num_left:
            self.take()

    def catch_up(self) -> None:
        """Take the coefficients now, if the model may have learnt since.

        For an idle machine: requests that are refused by old coefficients run no step that would bring new
        ones, and steps are predicted by what the model has learnt, which the coefficients must agree with.
        """
        if self.num_left < _REFRESH_STEPS:
            self.take()

    def take(self) -> None:
        """Take the coefficients from the model."""
        self.num_left = _REFRESH_STEPS
        probed = self._model.times_of(_PROBES, self._quantile)
        times, with_context = probed[: len(_SIZES)], probed[len(_SIZES) : -3]
        best = min([seconds / size for size, seconds in zip(_SIZES, times, strict=True)])
        place = next(place for place, size in enumerate(_SIZES) if times[place] <= best * size * _NEAR_BEST)
        self.efficient_chunk = chunk = _SIZES[place]
        pair = max(0.0, (with_context[place] - times[place]) / (chunk * USUAL_CONTEXT))
        longer = times[place + 1] if chunk < _SIZES[-1] else self.of(_chunk(2 * chunk))
        slope = (longer - times[place]) / chunk - pair * 1.5 * chunk
        # Beyond the largest chunk looked at, or under noise, the slope may be off: the mean cost bounds it.
        token = min(max(slope, 0.5 * best), best)
        few, many, short = probed[-3:]
        self._efficient_seconds = chunk * (token + pair * (0.5 * chunk))
        decode = max(0.0, (many - few) / 16)
        context = max(0.0, (many - short) / (32 * USUAL_CONTEXT - 32 * USUAL_CONTEXT // 8))
        self.costs = PrefillCosts(
            token=token,
            pair=pair,
            step=max(0.0, times[place] - self._efficient_seconds),
            decode=decode,
            context=min(context, decode / USUAL_CONTEXT),
            decode_base=max(0.0, few - 16 * decode),
        )
        self.seconds = self.costs.seconds
        self.alone_seconds = self.costs.decode_base + decode
        self.shortest_tbt = max(self.alone_seconds, self.least_tbt)
        self._least_alone = min(self._least_alone, self.alone_seconds)
        self.slowdown = self.alone_seconds / self._least_alone

    @property
    def spread(self) -> float:
        """How many times its expected time a step is certain to take at most, once the model knows."""
        chunk = _PROBES[_SIZES.index(self.efficient_chunk)]
        try:
            return max(1.0, self._model.step_time(chunk, CERTAIN) / self.of(chunk))
        except ConfigError:  # its error was never measured; it may learn of it from steps
            return 1.0

    def max_chunk(self, shape: BatchShape, num_cached: int, limit: float, *, scores: bool = False) -> int:
        """Return the longest chunk that may join within a limit, tokens.

        Parameters
        ----------
        scores : whether each of its tokens has logits.
        """
        longest = self._model.max_chunk_tokens(shape, num_cached, limit, self._quantile)
        if not scores:
            return longest

        def is_too_long(num_tokens: int) -> bool:
            trial = shape.copy()
            trial.add(num_cached, num_tokens, samples=num_tokens)
            return self.of(trial) > limit

        return bisect_left(range(1, longest + 1), x=True, key=is_too_long)

    def of_sums(self, num_tokens: float, num_pairs: float) -> float:
        """Return the work of several prompts, from the sums of their `RequestState.queued_work`."""
        return self.costs.token * num_tokens + self.costs.pair * num_pairs

    def idle_seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Return about how long the tokens take where nothing else runs."""
        return self.costs.step + self.seconds(num_tokens, num_cached_tokens)

    def prefill_share(self, decodes: BatchShape, limit: float, ttft: float) -> PrefillShare:
        """Return what prompts get of a step beside some decodes.

        A step of length L spends `costs.step` / L of the time on what each step costs, and lets whoever
        arrives meanwhile wait for a part of L / ttft of its objective. The sum of both shares is least at
        L = sqrt(costs.step ttft). A step is as long as that, or as an efficient chunk makes it; decodes do
        not count, since what longer steps save on them the streams then lack. No step has more tokens than it
        may.

        Where the limit cuts an efficient chunk short, the share is that of what fits. It may be far less than
        in proportion: short chunks read all weights, of experts nearly as many as long ones.

        Parameters
        ----------
        limit : seconds that the step may take at most.
        ttft : the shortest TTFT objective of the prompts, seconds; infinite without any.
        """
        most = max(self._most_step_tokens - decodes.num_new_tokens, 1)
        chunk = int(min(self.efficient_chunk, most))
        trial = decodes.copy()
        trial.add(0, chunk, samples=True)
        length = self.of(trial)
        if length > limit:
            done = self.seconds(self.max_chunk(decodes, 0, limit), 0)
            return PrefillShare(chunk, limit, min(max(done / limit if limit > 0 else 0.0, LEAST_SHARE), 1.0))
        done = self._efficient_seconds if chunk == self.efficient_chunk else self.seconds(chunk, 0)
        fixed = max(0.0, length - done)
        best = sqrt(self.costs.step * ttft) if ttft < inf else 0.0
        if best > length:
            longer = chunk + int((best - length) * chunk / done)
            length = best if longer <= most else length + (most - chunk) * done / chunk
            chunk = int(min(longer, most))
        length = min(length, limit)
        return PrefillShare(chunk, length, max(1 - fixed / length if length > 0 else 0.0, LEAST_SHARE))


def _chunk(num_tokens: int, num_cached_tokens: int = 0) -> BatchShape:
    """Return a step of one prompt's chunk alone."""
    shape = BatchShape()
    shape.add(num_cached_tokens, num_tokens, samples=True)
    return shape


_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_PROBES = (
    *map(_chunk, _SIZES),
    *[_chunk(size, USUAL_CONTEXT) for size in _SIZES],
    BatchShape.of_decodes(16, 16 * USUAL_CONTEXT),
    BatchShape.of_decodes(32, 32 * USUAL_CONTEXT),
    BatchShape.of_decodes(32, 32 * USUAL_CONTEXT // 8),
)
"""What the model is asked about: chunks, the same behind context, and decodes: few, many, and many that are
short. Nobody may change them."""


class DueWork(NamedTuple, Generic[StateT]):
    """A prompt, or what is left of it."""

    deadline: float
    """Of its first token, seconds; of its next one where a preempted request computes its tokens again."""
    seconds: float
    """Of prefill work that is left."""
    state: StateT


def select_feasible(
    jobs: Sequence[DueWork[StateT]],
    *,
    start: float,
    share: float,
    cost: Callable[[DueWork[StateT]], float | None],
    leaves_last: bool = False,
) -> tuple[list[DueWork[StateT]], list[DueWork[StateT]]]:
    """Split jobs into those to serve, in order of their deadlines, and those to leave behind.

    Going through the jobs by deadline, whenever one would be late the one of those so far that costs most is
    left behind, until it is not. Where the cost is the work, no other choice has more jobs in time (Moore,
    "An n job, one machine sequencing algorithm for minimizing the number of late jobs", Management Science
    15, 1968; Hodgson's form). Where a job that may not be left behind would be late without any other, no job
    is left behind for it.

    Parameters
    ----------
    jobs : by ascending deadline.
    start : when the first begins, seconds.
    share : of the machine's time that goes into this work, in (0, 1].
    cost : of keeping a job; None where it may not be left behind.
    leaves_last : whether of those that cost the same the last is left behind; else the first.
    """
    end = start
    for job in jobs:
        end += job.seconds / share
        if end > job.deadline:
            break
    else:  # all can be in time, whatever they cost
        return list(jobs), []
    heap: list[tuple[float, int]] = []
    left_behind: set[int] = set()
    end, droppable = start, 0.0
    """When the jobs so far end, and the time in it of those that may be left behind."""
    for index, job in enumerate(jobs):
        taken, value = job.seconds / share, cost(job)
        if end - droppable + taken > job.deadline:  # whichever others go
            if value is None:
                end += taken
            else:
                left_behind.add(index)
            continue
        end += taken
        if value is not None:
            droppable += taken
            heappush(heap, (-value, -index if leaves_last else index))
        while end > job.deadline and heap:
            costliest = abs(heappop(heap)[1])
            left_behind.add(costliest)
            end -= jobs[costliest].seconds / share
            droppable -= jobs[costliest].seconds / share
    kept = [job for index, job in enumerate(jobs) if index not in left_behind]
    return kept, [jobs[index] for index in sorted(left_behind)]


def drain_seconds(prefill: PrefillShare, seconds: float) -> float:
    """Return how long so much prefill work takes in such steps."""
    return seconds + _num_steps(prefill, seconds) * prefill.fixed_seconds


def finish_seconds(prefill: PrefillShare, seconds: float, all_seconds: float) -> float:
    """Return when the first so much of all work is done: at the end of its last step.

    That step holds what comes behind, too, as far as there is anything.
    """
    latest = drain_seconds(prefill, max(seconds, all_seconds))
    return min(_num_steps(prefill, seconds) * prefill.length, latest)


def _num_steps(prefill: PrefillShare, seconds: float) -> int:
    return ceil(seconds / (prefill.length * prefill.share))


def seconds_before(
    own: DueWork[StateT], left_behind: Sequence[DueWork[StateT]], *, by_deadline: float
) -> float | None:
    """Return the seconds of work that are done before an arrival's own; None where it is left behind.

    Parameters
    ----------
    own : the arrival.
    left_behind : of it and the prompts with deadlines.
    by_deadline : seconds of work of those that are due before it or with it, whether they can all be in time
        or not.
    """
    if any(job is own for job in left_behind):
        return None
    return max(0.0, by_deadline - sum(job.seconds for job in left_behind if job.deadline <= own.deadline))


@dataclass(slots=True)
class Ends:
    """The pace at which running requests end, exponentially weighted."""

    num: float = 0.0
    stream_seconds: float = 0.0
    """That all of them ran meanwhile."""

    def count(self, seconds: float, num_running: int, num_ended: int) -> None:
        """Count a time in which so many ran, and those that ended with it."""
        decay = exp(-max(0.0, seconds) / _MEMORY_SECONDS)
        self.num = self.num * decay + num_ended
        self.stream_seconds = self.stream_seconds * decay + (1 - decay) * _MEMORY_SECONDS * num_running

    def gap(self, num_running: int, usual: float = 0.0) -> float:
        """Return the seconds between two ends, with so many that run; while none ends, those since then.

        Parameters
        ----------
        usual : seconds that a request runs, which counts as one that was seen; 0 where nobody knows.
        """
        return (self.stream_seconds + usual) / max(self.num + (usual > 0), 1.0) / max(num_running, 1)


class FreeCapacity(NamedTuple):
    """What there is for those who wait, and how it comes free."""

    num_free_slots: int
    num_free_blocks: float
    given_back: float
    """Blocks of one that ends."""
    gap: float
    """Seconds between two ends."""


class Demand(NamedTuple):
    """Prompts that wait for a slot and blocks, as one."""

    deadline: float
    num: int
    num_blocks: float
    """Of each."""


def capacity_wait(ahead: Iterable[Demand], own: Demand, capacity: FreeCapacity, start: float) -> float:
    """Return the seconds from `start` until a prompt gets a slot and its blocks, by the pace of ends.

    One that ends gives back a slot, and as many blocks as streams and prompts have on average. Those that are
    due before it get theirs first, unless it comes too late for them: the replica gives them up, and serves
    them behind all others. Streams end independently of each other, so the time of the k-th end has a gamma
    distribution: its median is (k - 1/3) mean gaps, but for 4 % of it (Choi, Proc. AMS 121, 1994).

    Parameters
    ----------
    ahead : by deadline.
    """
    num_free_slots, num_free_blocks, given_back, gap = capacity
    num_ends, num_lacking = 1.0 - num_free_slots, -num_free_blocks
    for deadline, num, each in ahead:
        if deadline > own.deadline:
            break
        for _ in range(num):
            before = max(num_ends, (num_lacking + each) / given_back)
            is_late = before > 0 and start + (before - _MEDIAN_SOONER) * gap > deadline
            if not is_late or deadline <= start:  # what is late and still there is protected
                num_ends += 1
                num_lacking += each
    num_ends = max(num_ends, ceil((num_lacking + own.num_blocks) / given_back))
    return max(0.0, (num_ends - _MEDIAN_SOONER) * gap) if num_ends > 0 else 0.0
