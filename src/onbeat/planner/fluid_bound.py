r"""A rate that no policy can carry: the work that promises make due does not fit into the machine's time.

In every interval $[t_1, t_2]$, the work of the requests that arrive from $t_1$ on and whose deadlines lie
before $t_2$ must be done within $t_2 - t_1$, or some of them must be abandoned; the fewest are the costliest.
Whoever keeps a share $s$ of the promises abandons at most $1 - s$ of all requests, however the time is cut
into intervals. Prompts are due at arrival + ttft, token $k$ at arrival + ttft + $k$ tbt. The rest of the
argument is how little time that work can take:

- The time of a step is convex in its sums, so $n$ steps take at least $n$ times as long as one that holds the
  mean of their sums; and the fewer steps, the less, since what a step costs whatever it holds (weights,
  launches) is paid less often.
- In `stream` mode a step may be as long as twice the longest TTFT objective: an even longer one would make
  promises to requests that arrive during it impossible. In `gap` mode a step is no longer than the TBT
  objective while any stream runs; only the gaps above a stream's own P99 may be longer, by as much as a
  TTFT objective. Streams that run for certain are those with more tokens to come than the fastest steps can
  have delivered since their first token was due.
- A step decodes at most `max_num_seqs` rows.

All else is in the policy's favour: it knows arrivals and lengths, memory never lacks, nothing is done for
hopeless or abandoned requests, prefix hits are those of a cache without limit that already holds what
requests left out would have put there, and tokens in excess of the 99 % that must be in time are free.

`fluid_bound` holds for the very requests of a load, whose last deadlines lie well after the last arrival.
`sustained_bound` is what it tends to for ever longer loads: all work must be done while requests arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import floor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLOMode
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel
from onbeat.workload.offered import OfferedLoad

_Vector = NDArray[np.float64]

_NUM_EDGES = 12
"""Arrivals at which, and at whose deadlines, the time is cut into intervals."""
_NUM_INSTANTS = 500
"""At which it is known for certain whether streams run."""
_LATE_TOKENS_IN = 100
_LOWEST_RATE, _HIGHEST_RATE = 1e-3, 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundQuestion:
    """What must be kept."""

    share: float
    """Of the requests that are not hopeless, in (0, 1]."""
    mode: SLOMode
    max_num_seqs: int
    hopeless: NDArray[np.bool_]
    """For each request of the load."""


def fluid_bound(
    load: OfferedLoad, step_time: StepTimeModel, question: BoundQuestion, *, precision: float = 0.005
) -> float:
    """Return a rate (requests per second) above which no policy keeps the share on one replica; maybe 0.

    Parameters
    ----------
    load : requests with arrivals, which are stretched to the rates, and with TTFT and TBT objectives.
    precision : of the answer, as a share of it; it lies above the bound by as much at most.

    Raises
    ------
    ConfigError : a request without TTFT or TBT objective, or no request that is not hopeless.
    """
    return _highest(_Work(load, step_time, question).fits, precision)


def sustained_bound(
    load: OfferedLoad, step_time: StepTimeModel, question: BoundQuestion, *, precision: float = 0.005
) -> float:
    """Return a rate above which no policy keeps the share for ever, of requests like those of a load.

    A short load may pass it: part of its work is left to do after its last arrival. Parameters and errors as
    `fluid_bound`.
    """
    return _highest(_Work(load, step_time, question).is_sustained, precision)


def _highest(fits: Callable[[float], bool], precision: float) -> float:
    low = high = _LOWEST_RATE
    if not fits(low):
        return 0.0
    while high < _HIGHEST_RATE and fits(high):
        low, high = high, 4 * high
    while high > (1 + precision) * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if fits(middle) else (low, middle)
    return high


def unlimited_prefix_hits(load: OfferedLoad) -> NDArray[np.int64]:
    """Return the prompt tokens of each request that a cache without limit holds when it arrives."""
    hits = np.zeros(len(load), dtype=np.int64)
    if load.block_ids is None:
        return hits
    seen: set[int] = set()
    for row, block_ids in enumerate(load.block_ids):
        count = next((at for at, block_id in enumerate(block_ids) if block_id not in seen), len(block_ids))
        hits[row] = min(count * load.block_size, int(load.num_prompt_tokens[row]) - 1)
        seen.update(block_ids)
    return hits


@dataclass(frozen=True, slots=True)
class _Prices:
    """Seconds that one more of each costs a step that is large already."""

    token: float
    pair: float
    context: float


class _Work:
    """The requests that may be kept, as columns; arrivals as at one request per second."""

    def __init__(self, load: OfferedLoad, step_time: StepTimeModel, question: BoundQuestion) -> None:
        rows = np.flatnonzero(~question.hopeless)
        if load.arrivals is None or load.rate is None or not rows.size:
            raise ConfigError("a bound needs requests with arrivals, and some that are not hopeless")
        objectives = [load.slo(row) for row in rows.tolist()]
        limits = [(slo.ttft, slo.tbt) for slo in objectives if slo is not None and slo.ttft and slo.tbt]
        if len(limits) < len(rows):
            raise ConfigError("a bound needs TTFT and TBT objectives for every request")
        self._step_time = step_time
        self._question = question
        self._num_dropped = floor(len(rows) * (1 - question.share) + 1e-9)
        self._arrivals: _Vector = (load.arrivals * load.rate)[rows]
        self._span = float(len(load))
        self._ttft, self._tbt = (np.array(column) for column in zip(*limits, strict=True))
        self._cached = unlimited_prefix_hits(load)[rows].astype(np.float64)
        self._prompt = load.num_prompt_tokens[rows].astype(np.float64)
        self._num_decodes: _Vector = load.num_output_tokens[rows].astype(np.float64) - 1
        self._longest = float(self._ttft.max())
        self._prices = _prices(step_time)
        self._fastest = step_time.step_time(_one_row(0, 1))
        self._patience, self._num_pauses = self._late_decodes()

    def fits(self, rate: float) -> bool:
        """Whether the work fits without too many abandoned, however the time is cut into intervals."""
        arrivals = self._arrivals / rate
        steps = self._fewest_steps(arrivals)
        edges = np.linspace(0, len(arrivals) - 1, _NUM_EDGES).astype(np.int64)
        drain = arrivals[-1] + self._longest * np.arange(3)
        cuts = np.unique(np.concatenate([arrivals[edges], arrivals[edges] + self._longest, drain])).tolist()
        abandoned = [0]
        """The most that must be abandoned up to each cut."""
        for last, end in enumerate(cuts[1:], start=1):
            most = abandoned[-1]
            for start, before in zip(cuts[:last], abandoned, strict=True):
                allowed = self._num_dropped - before
                dropped = self._fewest_dropped(start, end, allowed, (arrivals, steps))
                if dropped > allowed:
                    return False
                most = max(most, before + dropped)
            abandoned.append(most)
        return True

    def _fewest_dropped(self, start: float, end: float, allowed: int, run: tuple[_Vector, _Steps]) -> int:
        """Return how many requests of an interval must be abandoned; more than allowed if so many are."""
        arrivals, steps = run
        time_left = end - arrivals - self._ttft
        is_due = (arrivals >= start) & (time_left >= 0)
        num_due = int(is_due.sum())
        if not num_due:
            return 0
        decodes = np.floor((time_left - self._patience)[is_due] / self._tbt[is_due])
        decodes = np.clip(decodes, 0, self._num_decodes[is_due])
        if self._question.mode == "stream":
            decodes = np.maximum(0, decodes - np.floor((self._num_decodes[is_due] + 1) / _LATE_TOKENS_IN))
        work, num_steps = self._by_cost(is_due, decodes), steps.between(start, end)

        def is_enough(count: int) -> bool:
            return count >= num_due or self._least_seconds(work, count, num_steps) <= end - start

        if is_enough(0):
            return 0
        if not is_enough(allowed):
            return allowed + 1
        low, high = 0, min(allowed, num_due)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high

    def is_sustained(self, rate: float) -> bool:
        """Whether the work of all requests fits into the time in which they arrive."""
        arrivals = self._arrivals / rate
        end = self._span / rate
        steps = self._fewest_steps(arrivals)
        everyone = np.ones(len(arrivals), dtype=np.bool_)
        work = self._by_cost(everyone, self._num_decodes)
        return self._least_seconds(work, self._num_dropped, steps.between(0.0, end)) <= end

    def _by_cost(self, is_due: NDArray[np.bool_], decodes: _Vector) -> _Vector:
        """Return the running sums of some requests' work, the cheapest request first: [requests, 5]."""
        prompts, cached = self._prompt[is_due], self._cached[is_due]
        tokens = prompts - cached
        pairs = tokens * cached + tokens * (tokens + 1) / 2
        context = decodes * prompts + decodes * (decodes + 1) / 2
        prices = self._prices
        cost = prices.token * (tokens + decodes) + prices.pair * pairs + prices.context * context
        columns = np.stack([tokens, decodes, pairs, context, cached], axis=1)
        return np.cumsum(columns[np.argsort(cost)], axis=0)

    def _least_seconds(self, work: _Vector, num_dropped: int, num_steps: float) -> float:
        """Return the least time for prompts and their decodes, but for the costliest."""
        kept = len(work) - num_dropped
        return self._seconds(work[kept - 1], kept, num_steps) if kept > 0 else 0.0

    def _seconds(self, sums: _Vector, num_prompts: int, num_steps: float) -> float:
        """Return the least time that the work takes in at least so many steps."""
        count = max(num_steps, float(sums[1]) / self._question.max_num_seqs, 1.0)
        tokens, decodes, pairs, context, cached = (sums / count).tolist()
        mean: dict[str, Any] = {  # sums of a mean step are no whole numbers
            "num_new_tokens": tokens + decodes,
            "num_sequences": decodes + 1,
            "num_decodes": decodes,
            "num_chunks": 1,
            "query_key_pairs": pairs,
            "chunk_cached_tokens": cached,
            "decode_context_tokens": context,
            "num_lm_head_rows": decodes + num_prompts / count,
        }
        return count * self._step_time.step_time(BatchShape(**mean))

    def _late_decodes(self) -> tuple[_Vector, int]:
        """Return by how many seconds a request's decodes may be late, and the most pauses that one may have.

        In `gap` mode gaps above the P99 may be long; in `stream` mode late tokens are taken off elsewhere.
        """
        if self._question.mode == "stream":
            return np.zeros(len(self._tbt)), 0
        position = np.maximum(0, self._num_decodes - 1) * 0.99
        num_free = np.maximum(0, self._num_decodes - 1 - np.ceil(position))
        weight = position - np.floor(position)
        # The P99 lies between two gaps: the upper one may be so long that the lower one is next to nothing.
        upper = np.divide(self._tbt, weight, out=np.full_like(self._tbt, 0.0), where=weight > 0) - self._tbt
        patience = num_free * self._longest + np.clip(upper, 0, self._longest)
        return patience, int(num_free.max()) + 1

    def _fewest_steps(self, arrivals: _Vector) -> _Steps:
        """Return how many steps there must be for the gaps of streams that run for certain."""
        instants = np.linspace(0, float(arrivals[-1]) + 3 * self._longest, _NUM_INSTANTS)
        longest = np.full(_NUM_INSTANTS, 2 * self._longest)
        if self._question.mode == "gap":
            # Whoever abandons the longest answers has the fewest streams that must be running.
            kept = np.argsort(self._num_decodes)[: len(arrivals) - self._num_dropped]
            starts = (arrivals + self._ttft)[kept]
            ends = (arrivals + self._num_decodes * self._fastest)[kept]
            for tbt in np.unique(self._tbt)[::-1]:  # the tightest last: it wins
                is_own = (self._tbt[kept] == tbt) & (ends > starts)
                begun = np.searchsorted(np.sort(starts[is_own]), instants, side="right")
                ended = np.searchsorted(np.sort(ends[is_own]), instants, side="left")
                longest[begun > ended] = tbt
        return _Steps(instants, longest, pause=self._num_pauses * self._longest)


class _Steps:
    """The fewest steps of an interval, from the longest step of each instant."""

    def __init__(self, instants: _Vector, longest: _Vector, *, pause: float) -> None:
        self._instants = instants
        middles = np.diff(instants) / longest[:-1]
        self._counts = np.concatenate([[0.0], np.cumsum(middles)])
        self._pause = pause

    def between(self, start: float, end: float) -> float:
        first, last = np.interp([start, end], self._instants, self._counts)
        in_pauses = min(1.0, self._pause / (end - start))
        return float(last - first) * (1 - in_pauses)


def _prices(step_time: StepTimeModel) -> _Prices:
    def seconds(num_computed_tokens: int, num_new_tokens: int) -> float:
        return step_time.step_time(_one_row(num_computed_tokens, num_new_tokens))

    token = (seconds(0, 4096) - seconds(0, 2048)) / 2048
    pair = (seconds(16_384, 2048) - seconds(0, 2048)) / (16_384 * 2048)
    context = (seconds(32_768, 1) - seconds(1024, 1)) / (32_768 - 1024)
    return _Prices(token=token, pair=pair, context=context)


def _one_row(num_computed_tokens: int, num_new_tokens: int) -> BatchShape:
    shape = BatchShape()
    shape.add(num_computed_tokens, num_new_tokens, samples=True)
    return shape
