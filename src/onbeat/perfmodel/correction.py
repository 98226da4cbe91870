"""Learning from the steps that run: a factor on the prediction, and an alarm when it is far from 1."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from onbeat.core.step import BatchShape

_KEY_STRIDE = 64  # above any bit length of a token count


class OnlineCorrection:
    """A multiplicative factor: the machine's pace x what a kind of batch takes beside others.

    The pace is that of all steps and is followed within some steps: a neighbour, heat or a slower clock
    change the time of every batch at once. How far the model is wrong of one kind of batch beside others
    (a bucket of new tokens and context read, by powers of two; and whether it has drafts) stays, and is
    learnt slowly. Were the two one, a kind that has not run for a while would keep the pace of its last
    steps, and which of two batches takes longer would depend on when each ran last.

    The pace is the median of the first steps, and a weighted geometric mean of measured / predicted from then
    on. Nothing bounds it, since a model may be wrong by any factor; what is bounded is how far one step moves
    it, lest a stall do. A step that is further off than `_FAR` counts as one that is just as far, a second in
    a row to the same side as twice as far, a third as three times: a stall comes alone, and a machine that
    has changed says so step after step.

    A batch with drafts has the factor of the same rows without, times what drafts turned out to cost beside
    their prediction: batches are compared before one of them runs, and drafts gain or lose a few per cent.
    """

    __slots__ = ("_buckets", "_drafts", "_first", "_num_far", "_pace", "has_lost_pace")

    def __init__(self) -> None:
        self.has_lost_pace = True
        """Whether predictions are catching up with a machine that has changed, or know nothing of it yet: how
        far they are off now does not say how far they will be."""
        self._first: list[float] = []
        """Of the first steps, log(measured / predicted)."""
        self._pace = 0.0
        """Logarithm, as of all that is kept here."""
        self._num_far = 0
        """Newest steps in a row that were further off than `_FAR`; negative where they were too short."""
        self._buckets: dict[int, _SlowMean] = {}
        self._drafts = DraftSurcharge()

    def factor(self, shape: BatchShape) -> float:
        """Return the factor on the prediction for a batch; 1 until enough steps were seen."""
        drafts = shape.num_draft_tokens
        context_tokens = shape.chunk_cached_tokens + shape.decode_context_tokens - drafts
        # `batch_kind`, written out: each question to a model that learns asks it.
        kind = (shape.num_new_tokens - drafts).bit_length() * _KEY_STRIDE + context_tokens.bit_length()
        bucket = self._buckets.get(kind)
        value = self._pace if bucket is None else self._pace + bucket.value
        return math.exp(value + self._drafts.of(shape).value if drafts else value)

    def bounds(self, shape: BatchShape, context: int, low: float, high: float) -> tuple[float, float]:
        """Return bounds of the factor while steps of decodes are learnt from.

        Each step moves the factor of its kind towards its own ratio, and all factors by no more than that.

        Parameters
        ----------
        shape : of the step before the first of them.
        context : that the step behind the last of them reads; those before read less.
        low, high : the least and the greatest measured / predicted of them.
        """
        if not 0 < low <= high < math.inf:
            return 1.0, math.inf
        key, bits = shape.num_new_tokens.bit_length() * _KEY_STRIDE, shape.decode_context_tokens.bit_length()
        buckets = [self._buckets.get(key + each) for each in range(bits, context.bit_length() + 1)]
        values = [0.0 if each is None else each.value for each in buckets]
        logs = [math.log(low), math.log(high), *[self._pace + value for value in values]]
        if len(self._first) < _NUM_FIRST:  # the pace may become the median of these
            logs += self._first
        slack = 0.01 + 0.1 * max(map(abs, values))  # for what old kinds forget, and for rounding
        least, most = min(logs), max(logs)
        return math.exp(2 * least - most - slack), math.exp(2 * most - least + slack)

    def factors_of(self, kinds: Iterable[int]) -> list[float]:
        """Return the factors on batches without drafts of each `batch_kind`."""
        pace, buckets, common = self._pace, map(self._buckets.get, kinds), math.exp(self._pace)
        return [common if bucket is None else math.exp(pace + bucket.value) for bucket in buckets]

    def observe(self, shape: BatchShape, ratio: float) -> float:
        """Learn from one step.

        Parameters
        ----------
        ratio : measured / predicted without this correction; positive and finite.

        Returns
        -------
        The factor as it was before.
        """
        value = math.log(ratio)
        if len(self._first) < _NUM_FIRST:
            self._first.append(value)
            if len(self._first) == _NUM_FIRST:
                self._pace, self.has_lost_pace = median(self._first), False
            return 1.0
        key, pace = batch_kind(shape), self._pace
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _SlowMean()
        believed = pace + bucket.value
        if shape.num_draft_tokens:
            believed += self._drafts.of(shape).value
            left = self._drafts.observe(shape, value - pace - bucket.value)
        else:
            left = bucket.observe(value - pace)
        if abs(left) <= _FAR:
            self._num_far, self.has_lost_pace = 0, False
        else:
            left = self._bounded(left)
        self._pace = pace + _WEIGHT * left
        return math.exp(believed)

    def observe_run(
        self,
        shape: BatchShape,
        contexts: Sequence[int],
        ratios: Sequence[float],
        expected: Sequence[float],
        limit: float,
    ) -> tuple[int, bool, bool, list[float]]:
        """Learn from steps that differ in the context of their decodes alone, as `observe` would of each.

        Parameters
        ----------
        shape : of any of them; afterwards that of the last that was learnt from.
        contexts, expected : `decode_context_tokens` and predicted seconds without this correction of each
            step, and of the one behind them.
        ratios : measured / predicted of each, as in `observe`.
        limit : see `StepTimeModel.observe_run`.

        Returns
        -------
        From how many it has learnt, and whether the next is within the limit; whether the pace was lost in
        one of them; and of those since, how far each was off, where that says how far off others will be:
        measured / (predicted with this correction).
        """
        off: list[float] = []
        has_lost, had_lost, position, goes_on = False, self.has_lost_pace, 0, True
        while goes_on and position < len(ratios):
            start = position
            if not had_lost and not shape.num_draft_tokens:
                position = self._observe_steady(shape, contexts, ratios, expected, position, limit, off)
            if position == start:
                shape.decode_context_tokens, ratio = contexts[position], ratios[position]
                position += 1
                factor = self.observe(shape, ratio)
                if self.has_lost_pace:
                    off.clear()
                    has_lost = had_lost = True
                elif had_lost:
                    had_lost = False
                else:
                    off.append(ratio / factor)
            if limit < math.inf:
                shape.decode_context_tokens = contexts[position]
                goes_on = expected[position] * self.factor(shape) <= limit
        shape.decode_context_tokens = contexts[position - 1]
        return position, goes_on, has_lost, off

    def _observe_steady(  # noqa: PLR0913 (what a run is)
        self,
        shape: BatchShape,
        contexts: Sequence[int],
        ratios: Sequence[float],
        expected: Sequence[float],
        position: int,
        limit: float,
        off: list[float],
    ) -> int:
        """Learn from steps that are near what is expected; return the position of the first that is not.

        Or of the one that is predicted to take longer than the limit. Written flat: it is asked for every
        step of a simulation, and a call costs more than it computes.
        """
        log, exp = math.log, math.exp
        far, weight, prior, longest, slow = _FAR, _WEIGHT, _PRIOR, _LONGEST_MEMORY, _SLOW_WEIGHT
        kind, cached = shape.num_new_tokens.bit_length() * _KEY_STRIDE, shape.chunk_cached_tokens
        pace, first, end, asks = self._pace, position, len(ratios), limit < math.inf
        while position < end:
            bits = (cached + contexts[position]).bit_length()
            # From there on steps are of the next kind.
            stop = bisect_left(contexts, (1 << bits) - cached, position)
            bucket = self._buckets.get(kind + bits)
            if bucket is None:
                bucket = self._buckets[kind + bits] = _SlowMean()
            believed, count, mean = bucket.value, bucket.count, bucket.mean
            for ratio in ratios[position:stop]:
                left = log(ratio) - pace - believed
                if abs(left) > far:
                    end = position
                    break
                off.append(ratio / exp(pace + believed))
                position += 1
                count += 1
                mean += (believed + left - mean) * (1 / count if count < longest else slow)
                believed = count * mean / (prior + count)  # these kinds are believed to be like all
                pace += weight * left
                if asks and position < stop and expected[position] * exp(pace + believed) > limit:
                    end = position
                    break
            bucket.value, bucket.count, bucket.mean = believed, count, mean
            if position == stop and asks:  # the next is of another kind: let the caller see
                break
        if position > first:
            self._num_far = 0
        self._pace = pace
        return position

    def _bounded(self, left: float) -> float:
        """Return how much to believe of what nobody expected of a step that is further off than `_FAR`."""
        side = 1 if left > 0 else -1
        self._num_far = self._num_far + side if self._num_far * side > 0 else side
        most = abs(self._num_far) * _FAR
        if abs(self._num_far) >= _NUM_SURE and abs(left) > most:
            self.has_lost_pace = True
        return min(max(left, -most), most)


class DraftSurcharge:
    """What steps with drafts take beyond their prediction, over what the same rows take without.

    The host's work for drafts is in no fitted model, and the fit itself is a little wrong. By powers of two
    of the rows, each believed to be like all until it has shown otherwise.
    """

    __slots__ = ("_all", "_by_size")

    def __init__(self) -> None:
        self._all = _SlowMean()
        self._by_size: dict[int, _SlowMean] = {}

    def of(self, shape: BatchShape) -> _SlowMean:
        """Return what is known of batches of this size."""
        return self._by_size.get(_size(shape), self._all)

    def observe(self, shape: BatchShape, value: float) -> float:
        """Learn from a step with drafts; return how far it was off.

        Parameters
        ----------
        value : log of measured / predicted, over the factor of the same rows without drafts.
        """
        left = value - self.of(shape).value
        self._all.observe(value)
        size = _size(shape)
        of_size = self._by_size.get(size)
        if of_size is None:
            of_size = self._by_size[size] = _SlowMean(self._all)
        of_size.observe(value)
        return left


class _SlowMean:
    """A mean that believes what it was given to begin with until many values say otherwise.

    Parameters
    ----------
    prior : what to believe at first; None is 0.
    """

    __slots__ = ("_prior", "count", "mean", "value")

    def __init__(self, prior: _SlowMean | None = None) -> None:
        self._prior = prior
        self.count = 0
        """Of the values so far."""
        self.mean = 0.0
        """Of them."""
        self.value: float = 0.0 if prior is None else prior.value
        """What is believed."""

    def observe(self, value: float) -> float:
        """Count a value, as at most `_FAR` away from what was believed; return how far it was away."""
        believed = self.value
        left = value - believed
        value = believed + (left if abs(left) <= _FAR else math.copysign(_FAR, left))
        self.count = count = self.count + 1
        self.mean += (value - self.mean) * (1 / count if count < _LONGEST_MEMORY else _SLOW_WEIGHT)
        prior = 0.0 if self._prior is None else self._prior.value
        self.value = (_PRIOR * prior + count * self.mean) / (_PRIOR + count)
        return left


_NUM_FIRST = 8
"""Steps that must be in before there is a pace: the first ones of an engine may take long, but not most."""
_WEIGHT = 0.2
"""Share of the newest step in the pace: noise of 5 % a step makes it uncertain by 2 %."""
_FAR = 0.3
"""Of a step's logarithm beyond what was expected: six times that noise, and a stall moves the pace by 6 %."""
_NUM_SURE = 3
"""The step in a row that tells another pace from a slow spell, if it is still so many times `_FAR` off:
in a change to 2.5 times it no longer is, in one to 3.5 times it is."""
_LONGEST_MEMORY = 64
_SLOW_WEIGHT = 1 / _LONGEST_MEMORY
"""Share of the newest step in what a kind of batch takes beside others, once there were that many."""
_PRIOR = 16
"""Steps that what was believed of a kind counts for beside its own."""


def batch_kind(shape: BatchShape) -> int:
    """Return the bucket of a batch, or of the same rows without their drafts."""
    drafts = shape.num_draft_tokens
    context_tokens = shape.chunk_cached_tokens + shape.decode_context_tokens - drafts
    return (shape.num_new_tokens - drafts).bit_length() * _KEY_STRIDE + context_tokens.bit_length()


def _size(shape: BatchShape) -> int:
    return (shape.num_new_tokens - shape.num_draft_tokens).bit_length()


@dataclass(frozen=True, slots=True)
class Drift:
    """Whether the model still describes the machine."""

    is_alarming: bool
    ratio: float
    """Typical measured / predicted of recent steps, online correction left out."""
    num_steps: int
    """Steps seen so far."""


class DriftAlarm:
    """Watches measured / predicted over all steps; on and off at different levels, lest it flicker.

    Parameters
    ----------
    on : typical ratio, either way, at which the alarm comes on.
    off : the ratio below which it goes off again.
    memory : steps over which the mean forgets, and that must be seen before the first alarm.
    """

    __slots__ = ("_is_alarming", "_mean", "_memory", "_num_steps", "_off", "_on")

    def __init__(self, *, on: float = 1.3, off: float = 1.15, memory: int = 64) -> None:
        self._on = math.log(on)
        self._off = math.log(off)
        self._memory = memory
        self._mean = 0.0
        self._num_steps = 0
        self._is_alarming = False

    def observe(self, ratio: float) -> None:
        """Count one step's measured / predicted."""
        self._num_steps = num_steps = self._num_steps + 1
        left = math.log(ratio) - self._mean
        if abs(left) > _LOG_LIMIT:
            # A stall of a second is not drift: one step weighs as a factor of four beside the others at most.
            left = math.copysign(_LOG_LIMIT, left)
        self._mean += left / (num_steps if num_steps < self._memory else self._memory)
        if self._is_alarming:
            self._is_alarming = abs(self._mean) >= self._off
        elif self._num_steps >= self._memory:
            self._is_alarming = abs(self._mean) >= self._on

    @property
    def state(self) -> Drift:
        """What has been seen so far."""
        return Drift(self._is_alarming, math.exp(self._mean), self._num_steps)


_LOG_LIMIT = math.log(4)
