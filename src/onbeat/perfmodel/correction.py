"""Learning from the steps that run: a factor on the prediction, and an alarm when it is far from 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape

_KEY_STRIDE = 64  # above any bit length of a token count


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """How quickly and how far to follow the measured steps."""

    weight: float = 0.2
    """Share of the newest step in the pace (until 1 / weight steps are in, the plain mean)."""
    ready_after: int = 8
    """Steps that must be in before any factor is used."""
    lowest: float = 0.5
    highest: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ConfigError(f"the weight of a new step must be in (0, 1]: {self.weight}")
        if self.ready_after < 1:
            raise ConfigError(f"factors must be ready after at least one step: {self.ready_after}")
        if not 0 < self.lowest <= 1 <= self.highest < math.inf:
            raise ConfigError(f"the factor's bounds must enclose 1: [{self.lowest}, {self.highest}]")


class OnlineCorrection:
    """A multiplicative factor: the machine's pace x what a kind of batch takes beside others.

    The pace is that of all steps and is followed within some steps: a neighbour, heat or a slower clock
    change the time of every batch at once. How far the model is wrong of one kind of batch beside others
    (a bucket of new tokens and context read, by powers of two; and whether it has drafts) stays, and is
    learnt slowly. Were the two one, a kind that has not run for a while would keep the pace of its last
    steps, and which of two batches takes longer would depend on when each ran last.

    All are exponentially weighted geometric means of measured / predicted. Each step counts as at most the
    bounds, and moves the pace as one that is a third off, so that one stall cannot move it far.

    A batch with drafts has the factor of the same rows without, times what drafts turned out to cost beside
    their prediction: batches are compared before one of them runs, and drafts gain or lose a few per cent.
    """

    __slots__ = ("_buckets", "_drafts", "_log_bounds", "_num_steps", "_pace", "config")

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self.config = config or CorrectionConfig()
        self._log_bounds = math.log(self.config.lowest), math.log(self.config.highest)
        self._num_steps = 0
        self._pace = 0.0
        """Logarithm, as of all that is kept here."""
        self._buckets: dict[int, _SlowMean] = {}
        self._drafts = DraftSurcharge()

    def factor(self, shape: BatchShape) -> float:
        """Return the factor on the prediction for a batch; 1 until enough steps were seen."""
        if self._num_steps < self.config.ready_after:
            return 1.0
        value = self._pace
        bucket = self._buckets.get(_key(shape))
        if bucket is not None:
            value += bucket.value
        if shape.num_draft_tokens:
            value += self._drafts.of(shape).value
        low, high = self._log_bounds
        if low <= value <= high:
            return math.exp(value)
        return self.config.lowest if value < low else self.config.highest

    def observe(self, shape: BatchShape, ratio: float) -> None:
        """Learn from one step.

        Parameters
        ----------
        ratio : measured / predicted without this correction; positive and finite.
        """
        low, high = self._log_bounds
        value = min(max(math.log(ratio), low), high)
        left = value - self._pace
        if self._num_steps >= self.config.ready_after:  # until then all is the pace
            left = self._learn_kind(shape, left)
            left = min(max(left, -_MOST_LEFT), _MOST_LEFT)
        self._num_steps += 1
        self._pace += max(self.config.weight, 1 / self._num_steps) * left

    def _learn_kind(self, shape: BatchShape, value: float) -> float:
        """Learn what a kind of batch takes beside others; return what nobody expected of the value."""
        key = _key(shape)
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _SlowMean()
        if not shape.num_draft_tokens:
            left = value - bucket.value
            bucket.observe(value)
            return left
        value -= bucket.value
        left = value - self._drafts.of(shape).value
        self._drafts.observe(shape, value)
        return left


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

    def observe(self, shape: BatchShape, value: float) -> None:
        """Learn from a step with drafts.

        Parameters
        ----------
        value : log of measured / predicted, over the factor of the same rows without drafts.
        """
        self._all.observe(value)
        size = _size(shape)
        of_size = self._by_size.get(size)
        if of_size is None:
            of_size = self._by_size[size] = _SlowMean(self._all)
        of_size.observe(value)


class _SlowMean:
    """A mean that believes what it was given to begin with until many values say otherwise.

    Parameters
    ----------
    prior : what to believe at first; None is 0.
    """

    __slots__ = ("_count", "_mean", "_prior", "value")

    def __init__(self, prior: _SlowMean | None = None) -> None:
        self._prior = prior
        self._count = 0
        self._mean = 0.0
        self.value: float = 0.0 if prior is None else prior.value

    def observe(self, value: float) -> None:
        self._count += 1
        self._mean += (value - self._mean) * max(_SLOW_WEIGHT, 1 / self._count)
        prior = 0.0 if self._prior is None else self._prior.value
        self.value = (_PRIOR * prior + self._count * self._mean) / (_PRIOR + self._count)


_MOST_LEFT = 0.3
"""Of a step's logarithm beyond what was expected, as far as it moves the pace."""
_SLOW_WEIGHT = 1 / 64
"""Share of the newest step in what a kind of batch takes beside others."""
_PRIOR = 16
"""Steps that what was believed of a kind counts for beside its own."""


def _key(shape: BatchShape) -> int:
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
        if not 1 < off <= on < math.inf or memory < 1:
            raise ConfigError(f"a drift alarm needs 1 < off <= on and memory >= 1: {on=}, {off=}, {memory=}")
        self._on = math.log(on)
        self._off = math.log(off)
        self._memory = memory
        self._mean = 0.0
        self._num_steps = 0
        self._is_alarming = False

    def observe(self, ratio: float) -> None:
        """Count one step's measured / predicted."""
        self._num_steps += 1
        # A stall of a second is not drift: one step weighs as a factor of four at most.
        value = min(max(math.log(ratio), -_LOG_LIMIT), _LOG_LIMIT)
        self._mean += (value - self._mean) / min(self._num_steps, self._memory)
        if self._is_alarming:
            self._is_alarming = abs(self._mean) >= self._off
        elif self._num_steps >= self._memory:
            self._is_alarming = abs(self._mean) >= self._on

    @property
    def state(self) -> Drift:
        """What has been seen so far."""
        return Drift(self._is_alarming, math.exp(self._mean), self._num_steps)


_LOG_LIMIT = math.log(4)
