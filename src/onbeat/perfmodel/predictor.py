"""The one implementation of `core.StepTimeModel`: any closure of a batch, made fit for decisions.

`ResidualModel` is how far measured steps lie from the predicted ones: it turns a mean into a quantile.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from copy import copy, deepcopy
from functools import partial
from operator import mul, sub, truediv
from statistics import NormalDist

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, seconds_of_each
from onbeat.perfmodel.correction import Drift, DriftAlarm, OnlineCorrection, batch_kind
from onbeat.perfmodel.fitted import FitErrors
from onbeat.perfmodel.precision import Precision
from onbeat.perfmodel.profile import ServerTerms
from onbeat.perfmodel.runs import StepSeconds
from onbeat.perfmodel.shapes import ShapeRange


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


_REFRESH_EVERY = 32
"""Steps between two looks at the window: a quantile moves slowly, and sorting takes time."""


class OnlineQuantile:
    """Quantiles of measured / predicted over the last steps.

    Parameters
    ----------
    window : steps that are remembered.
    ready_after : steps that must have been seen; before that, whoever asks relies on what was known before.
    """

    __slots__ = ("_factors", "_has_looked", "_num_left", "_ratios", "_ready_after", "_window")

    def __init__(self, *, window: int = 512, ready_after: int = 64) -> None:
        self._window = window
        # Those since the last look, too: the window is cut out and sorted for those who ask, if anybody does.
        self._ratios: deque[float] = deque(maxlen=window + _REFRESH_EVERY)
        self._ready_after = ready_after
        self._num_left = ready_after
        self._has_looked = False
        self._factors: dict[float, float] = {}

    def observe(self, ratio: float) -> None:
        """Count one step's measured / predicted time; positive and finite."""
        self._ratios.append(ratio)
        self._num_left -= 1
        if self._num_left <= 0:
            self._num_left = _REFRESH_EVERY
            self._has_looked = True
            self._factors.clear()

    def observe_all(self, ratios: Sequence[float]) -> None:
        """Count the ratios of several steps, in their order."""
        first = 0
        while len(ratios) - first >= self._num_left > 0:  # a look at the window comes between them
            first += self._num_left
            self._ratios.extend(ratios[first - self._num_left : first - 1])
            self._num_left = 1
            self.observe(ratios[first - 1])
        self._ratios.extend(ratios[first:])
        self._num_left -= len(ratios) - first

    @property
    def greatest(self) -> float:
        """The greatest ratio that is remembered; 0 where none is."""
        return max(self._ratios, default=0.0)

    def forget(self) -> None:
        """Begin anew: the steps so far say nothing of those to come."""
        self._ratios.clear()
        self._has_looked = False
        self._factors.clear()
        self._num_left = self._ready_after

    def factor(self, q: float) -> float | None:
        """Return the q-quantile, by the nearest rank; None until enough steps were seen."""
        if not self._has_looked:
            return None
        found = self._factors.get(q)
        if found is None:
            end = len(self._ratios) - (_REFRESH_EVERY - self._num_left)
            seen = sorted(list(self._ratios)[max(0, end - self._window) : end])
            found = self._factors[q] = seen[min(int(q * len(seen)), len(seen) - 1)]
        return found


MAX_CHUNK_TOKENS = 1 << 22
"""The longest chunk that `Predictor.max_chunk_tokens` answers: the budget does not bind."""

GUIDED_ROW_SECONDS = 3e-5
"""Of a row under a grammar, until steps tell: 6 us a token, 120 us for the one in five that is refused."""
_GUIDES_MEMORY = 16
"""Steps with grammars over which their mean forgets: which of them run changes as fast."""
_FIRST_PROBE = 256
_MOST_SECANTS = 6


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
        return _invert(_chunk_seconds(self.step_time, shape, cached_tokens, q), budget)

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


def _chunk_seconds(
    step_time: Callable[[BatchShape, float | None], float],
    base: BatchShape,
    cached_tokens: int,
    q: float | None,
) -> Callable[[int], float]:
    """Return the time of a batch as a function of one more chunk's length."""
    shape = base.copy()
    shape.add(cached_tokens, 2, samples=True)

    def seconds(num_tokens: int) -> float:
        if num_tokens == 1:  # a single token is a decode row
            single = base.copy()
            single.add(cached_tokens, 1, samples=True)
            return step_time(single, q)
        # Only these three sums change with the length; a fresh batch for each trial would cost more than the
        # model does.
        shape.num_new_tokens = base.num_new_tokens + num_tokens
        shape.query_key_pairs = (
            base.query_key_pairs + num_tokens * cached_tokens + num_tokens * (num_tokens + 1) // 2
        )
        shape.sum_chunk_squares = base.sum_chunk_squares + num_tokens * num_tokens
        return step_time(shape, q)

    return seconds


def _invert(seconds: Callable[[int], float], budget: float) -> int:
    """Return n in [0, MAX_CHUNK_TOKENS] with seconds(n) <= budget < seconds(n + 1)."""
    low, low_seconds = 1, seconds(1)
    # Written so that a budget of NaN admits nothing.
    if not low_seconds <= budget:
        return 0
    high = _FIRST_PROBE
    while (high_seconds := seconds(high)) <= budget:
        if high >= MAX_CHUNK_TOKENS:
            return MAX_CHUNK_TOKENS
        slope = (high_seconds - low_seconds) / (high - low)
        low, low_seconds = high, high_seconds
        # A little beyond where the line meets the budget: a narrow bracket saves more trials than it costs.
        beyond = 1.2 * (budget - low_seconds) / slope if slope > 0 else math.inf
        high = min(high + int(min(max(beyond, 16), 15 * high)), MAX_CHUNK_TOKENS)
    return _bisect(seconds, (low, low_seconds - budget), (high, high_seconds - budget), budget)


def _bisect(
    seconds: Callable[[int], float], low: tuple[int, float], high: tuple[int, float], budget: float
) -> int:
    """Return n with seconds(n) <= budget < seconds(n + 1) between two points (n, seconds(n) - budget).

    Step times are nearly linear in pieces, so that the Illinois method (a secant; an end that stays twice is
    halved) needs few trials; where the budget falls into a jump, the middle is tried after these.
    """
    (low_n, low_excess), (high_n, high_excess) = low, high
    trials = last_side = 0
    while (width := high_n - low_n) > 1:
        trials += 1
        share = 0.5 if trials > _MOST_SECANTS else low_excess / (low_excess - high_excess)
        guess = min(max(low_n + int(width * share), low_n + 1), high_n - 1)
        excess = seconds(guess) - budget
        side = 1 if excess > 0 else -1
        if side < 0:
            low_n, low_excess = guess, excess
            high_excess /= 2 if last_side == side else 1
        else:
            high_n, high_excess = guess, excess
            low_excess /= 2 if last_side == side else 1
        last_side = side
    return low_n
