"""The one implementation of `core.StepTimeModel`: any closure of a batch, made fit for decisions.

`ResidualModel` is how far measured steps lie from the predicted ones: it turns a mean into a quantile.
`OnlineCorrection` learns from the steps that run: a factor on the prediction.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from functools import partial
from operator import mul, sub, truediv
from statistics import NormalDist, median

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, seconds_of_each
from onbeat.perfmodel.fitted import FitErrors
from onbeat.perfmodel.inversion import chunk_seconds, longest_chunk
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import ServerTerms
from onbeat.perfmodel.recent import Drift, DriftAlarm, OnlineQuantile
from onbeat.perfmodel.runs import StepSeconds
from onbeat.perfmodel.shapes import ShapeRange

GUIDED_ROW_SECONDS = 3e-5
"""Of a row under a grammar, until steps tell: 6 us a token, 120 us for the one in five that is refused."""
_GUIDES_MEMORY = 16
"""Steps with grammars over which their mean forgets: which of them run changes as fast."""


class Predictor(StepTimeModel):
    """Step times with quantiles, inflation outside the measured range, online correction and a drift alarm.

    prediction = closure x inflation(range) x factor(correction) x quantile(residual) + guided. That is the
    mean time of a row under a grammar, times such rows. Given the same calls it gives the same answers: it
    reads no clock and draws no random numbers.

    Parameters
    ----------
    seconds : expected time of a batch with at least one row; positive and finite. A `StepSeconds` is asked
        for several steps at once, anything else for one after another.
    residual : distribution of measured / predicted; without one a quantile cannot be asked for.
    shape_range : the batches behind the closure; None where it holds everywhere.
    correction : online factors; None to keep the closure as it is.
    alarm : looks at every observed step; None for none.
    recent : quantiles of observed steps, which replace those of `residual` once there are enough.
    errors : of the closure on steps that it was not fitted to; None where nothing was fitted.
    server : what the engine does beside its steps.
    precision : number formats of what was measured; None where nothing was.
    """

    __slots__ = (
        *("_alarm", "_correction", "_guided_row", "_inflation", "_recent", "_residual", "_run_seconds"),
        *("_known", "_seconds", "errors", "precision", "server", "shape_range"),
    )

    def __init__(  # noqa: PLR0913 - parts that are there or not
        self,
        seconds: Callable[[BatchShape], float],
        residual: ResidualModel | None = None,
        shape_range: ShapeRange | None = None,
        correction: OnlineCorrection | None = None,
        alarm: DriftAlarm | None = None,
        recent: OnlineQuantile | None = None,
        errors: FitErrors | None = None,
        server: ServerTerms | None = None,
        precision: Precision | None = None,
    ) -> None:
        self.errors, self.precision = errors, precision
        self.server = server or ServerTerms()
        if not isinstance(seconds, StepSeconds):
            seconds = StepSeconds(seconds, partial(seconds_of_each, seconds))
        self._seconds, self._run_seconds = seconds.of_one, seconds.of_run
        self._residual = residual
        self.shape_range = shape_range
        self._inflation = None if shape_range is None else shape_range.inflation
        self._correction = correction
        self._alarm = alarm
        self._recent = recent
        self._guided_row = GUIDED_ROW_SECONDS
        self._known: dict[int, tuple[tuple[BatchShape, ...], list[float], list[int]]] = {}
        """Of batches that never change, what does not: seconds without what is learnt, and their kind."""

    def with_learning(self, alarm: DriftAlarm | None = None) -> Predictor:
        """Return the same model, but one that learns factors and quantiles from steps.

        Parameters
        ----------
        alarm : looks at every observed step; None for none.
        """
        other = copy(self)
        other._alarm, other._correction, other._recent = alarm, OnlineCorrection(), OnlineQuantile()
        return other

    def __deepcopy__(self, memo: dict[int, object]) -> Predictor:
        """Return the same model, which learns by itself from now on; what never changes is shared."""
        other = copy(self)
        other._alarm, other._correction, other._recent = deepcopy(
            (self._alarm, self._correction, self._recent), memo
        )
        return other

    def step_time(self, shape: BatchShape, q: float | None = None) -> float:
        """Return the expected time, or its q-quantile. See `core.StepTimeModel`."""
        if not shape.num_new_tokens:
            return 0.0
        seconds = self._seconds(shape)
        if self._inflation is not None:
            seconds *= self._inflation(shape)
        if self._correction is not None:
            seconds *= self._correction.factor(shape)
        if q is not None:
            seconds *= self._quantile_factor(q)
        return seconds + self._guided_row * shape.num_guided_rows

    def times_of(self, shapes: tuple[BatchShape, ...], q: float | None = None) -> list[float]:
        """Return `step_time` of batches that never change. See `core.StepTimeModel`."""
        known = self._known.get(id(shapes))
        if known is None or known[0] is not shapes:
            inflation = self._inflation or (lambda _: 1.0)
            times = [self._seconds(shape) * inflation(shape) for shape in shapes]
            known = self._known[id(shapes)] = (shapes, times, [*map(batch_kind, shapes)])
        times, factor = known[1], 1.0 if q is None else self._quantile_factor(q)
        if self._correction is not None:
            times = list(map(mul, times, self._correction.factors_of(known[2])))
        return times if factor == 1.0 else [seconds * factor for seconds in times]

    def step_times(self, shape: BatchShape, contexts: Sequence[int]) -> Sequence[float]:
        """Return the expected times of steps that differ in what decodes read. See `core.StepTimeModel`."""
        if self._correction is not None or self._inflation is not None or shape.num_guided_rows:
            return super().step_times(shape, contexts)
        return self._run_seconds(shape, contexts)

    def max_chunk_tokens(
        self, shape: BatchShape, cached_tokens: int, budget: float, q: float | None = None
    ) -> int:
        """Return the longest chunk that may join a batch within a time budget. See `core.StepTimeModel`.

        The chunk is taken to sample, which costs its row of the LM head. The answer n is exact: n tokens are
        within the budget and n + 1 are not. Where the model is not monotone (a bucket's factor), it is one
        such n.
        """
        return longest_chunk(chunk_seconds(partial(self.step_time, q=q), shape, cached_tokens), budget)

    def observe(self, shape: BatchShape, seconds: float) -> None:
        """Learn from a measured step.

        A time that is not positive (a clock that stood still) teaches nothing and is passed over.
        """
        correction, alarm, recent = self._correction, self._alarm, self._recent
        if correction is None and alarm is None and recent is None:
            return
        seconds -= self._guided_row * shape.num_guided_rows
        if not (shape.num_new_tokens and 0 < seconds < math.inf):
            return
        expected = self._seconds(shape)
        if self._inflation is not None:
            expected *= self._inflation(shape)
        ratio = seconds / expected
        if correction is None:
            if recent is not None:
                recent.observe(ratio)
        else:
            had_lost_pace = correction.has_lost_pace
            factor = correction.observe(shape, ratio)
            # How far off a step was, where that says how far off others will be.
            if recent is not None:
                if correction.has_lost_pace:
                    recent.forget()  # the first steps of the change were counted before it was known for one
                elif not had_lost_pace:
                    recent.observe(ratio / factor)
        if alarm is not None:
            alarm.observe(ratio)

    def observe_run(
        self,
        shape: BatchShape,
        begun: float,
        ends: Sequence[float],
        limit: float = math.inf,
        q: float | None = None,
    ) -> tuple[int, bool]:
        """Learn from steps that followed one another. See `core.StepTimeModel`."""
        correction, recent = self._correction, self._recent
        is_alone = self._alarm is None and self._inflation is None and not shape.num_guided_rows
        asks = limit < math.inf and q is not None
        if correction is None or recent is None or asks or not is_alone or len(ends) == 1:
            return super().observe_run(shape, begun, ends, limit, q)
        contexts, expected, ratios = self._judged(shape, begun, ends)
        if not 0 < min(ratios) <= max(ratios) < math.inf:  # a clock that stood still
            return super().observe_run(shape, begun, ends, limit, q)
        num, goes_on, has_lost, off = correction.observe_run(shape, contexts, ratios, expected, limit)
        if has_lost:
            recent.forget()
        if off:
            recent.observe_all(off)
        return num, goes_on

    def is_within(
        self, shape: BatchShape, begun: float, ends: Sequence[float], limit: float, q: float | None = None
    ) -> bool:
        """Return whether each of some steps and the next are sure to be predicted within a limit, seconds.

        Whatever `observe_run` has learnt by then; nothing is learnt here. False where that is not plain.
        """
        correction, recent = self._correction, self._recent
        if correction is None or recent is None or self._inflation is not None or shape.num_guided_rows:
            return False
        contexts, expected, ratios = self._judged(shape, begun, ends)
        least, most = correction.bounds(shape, contexts[-1], min(ratios), max(ratios))
        if q is not None:  # what is seen counts once there is enough, and its quantile is no more than all
            known = self._quantile_factor(q) if self._residual is None else self._residual.factor(q)
            most *= max(known, max(ratios) / least, recent.greatest)
        return max(expected) * most <= limit

    def _judged(
        self, shape: BatchShape, begun: float, ends: Sequence[float]
    ) -> tuple[Sequence[int], Sequence[float], list[float]]:
        """Return the contexts and predicted seconds of steps and the next one, and measured / predicted."""
        rows = shape.num_lm_head_rows
        first = shape.decode_context_tokens + rows
        contexts = range(first, first + (len(ends) + 1) * rows, rows)
        expected = self._run_seconds(shape, contexts)
        measured = map(sub, ends, [begun, *ends[:-1]])
        return contexts, expected, list(map(truediv, measured, expected))

    def observe_guides(self, num_rows: int, seconds: float) -> None:
        """Learn what a row under a grammar takes. See `core.StepTimeModel`."""
        if self._correction is not None and num_rows:
            self._guided_row += (seconds / num_rows - self._guided_row) / _GUIDES_MEMORY

    @property
    def drift(self) -> Drift | None:
        """Whether the measured steps have left the model; None without an alarm."""
        return None if self._alarm is None else self._alarm.state

    def _quantile_factor(self, q: float) -> float:
        if self._recent is not None and (recent := self._recent.factor(q)) is not None:
            return recent
        if self._residual is None:
            raise ConfigError(
                f"this step-time model knows no quantiles (asked for {q}): its error was never measured. "
                "Ask for the mean, or use a fitted model"
            )
        return self._residual.factor(q)


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


class ResidualModel:
    """The distribution of measured / predicted step time.

    Parameters
    ----------
    ratios : measured / predicted of steps that the fit has not seen; positive and finite.
    """

    __slots__ = ("_factors", "_log_sigma", "ratios")

    def __init__(self, ratios: Iterable[float]) -> None:
        self.ratios: tuple[float, ...] = tuple(sorted(ratios))
        if not self.ratios:
            raise ConfigError("a residual model needs at least one held-back step; got none")
        if not (self.ratios[0] > 0 and all(math.isfinite(ratio) for ratio in self.ratios)):
            raise ConfigError(f"ratios of measured to predicted step time must be positive: {self.ratios}")
        self._log_sigma: float | None = None
        self._factors: dict[float, float] = {}

    @classmethod
    def log_normal(cls, sigma: float) -> ResidualModel:
        """Return the residuals of a model that nothing has been measured for.

        Parameters
        ----------
        sigma : standard deviation of the log of measured / predicted; 0 makes every quantile the mean.
        """
        residual = cls((1.0,))
        residual._log_sigma = sigma
        return residual

    def factor(self, q: float) -> float:
        """Return the q-quantile of measured / predicted.

        Between the n ordered ratios it is interpolated at (n + 1) q: the k-th of n ratios is exceeded by a
        new one with probability (n + 1 - k) / (n + 1), so that few points give wide quantiles, not narrow
        ones. Beyond the last ratio it is the last.
        """
        found = self._factors.get(q)
        if found is None:
            found = self._factors[q] = self._quantile(q)
        return found

    def _quantile(self, q: float) -> float:
        if not 0 < q < 1:
            raise ConfigError(f"a quantile of the step time must lie between 0 and 1, both excluded: {q}")
        if self._log_sigma is not None:
            return math.exp(self._log_sigma * NormalDist().inv_cdf(q))
        position = min(max((len(self.ratios) + 1) * q - 1, 0.0), len(self.ratios) - 1.0)
        index = min(int(position), len(self.ratios) - 2)
        if index < 0:
            return self.ratios[0]
        low, high = self.ratios[index], self.ratios[index + 1]
        return low + (high - low) * (position - index)
