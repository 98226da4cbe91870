"""Learning from the steps that run: factors on the prediction, and an alarm when they are far from 1."""

from __future__ import annotations

import math
from dataclasses import dataclass

from onbeat.core.errors import ConfigError
from onbeat.core.step import BatchShape

_KEY_STRIDE = 64  # above any bit length of a token count


@dataclass(frozen=True, slots=True)
class CorrectionConfig:
    """How quickly and how far to follow the measured steps."""

    weight: float = 0.1
    """Share of the newest step in a bucket's mean (until 1 / weight steps are in, the plain mean)."""
    ready_after: int = 8
    """Steps that a bucket needs before its factor is used."""
    lowest: float = 0.5
    highest: float = 2.0

    def __post_init__(self) -> None:
        if not 0 < self.weight <= 1:
            raise ConfigError(f"the weight of a new step must be in (0, 1]: {self.weight}")
        if self.ready_after < 1:
            raise ConfigError(f"a bucket must be ready after at least one step: {self.ready_after}")
        if not 0 < self.lowest <= 1 <= self.highest < math.inf:
            raise ConfigError(f"the factor's bounds must enclose 1: [{self.lowest}, {self.highest}]")


class OnlineCorrection:
    """Multiplicative factors by bucket of (new tokens, context read), by powers of two; one more with drafts.

    A bucket's factor is the exponentially weighted geometric mean of measured / predicted. Each step counts
    as at most the bounds, so that one stall cannot move it far.

    With drafts in use, batches are compared before one of them runs, and drafts gain or lose a few per cent:
    a factor that only one of the two has would decide, by its noise or because the other never runs. So a
    batch with drafts has the factor of the same rows without, times what drafts turned out to cost beside
    their prediction, which is learnt slowly; and from the first step with drafts on, a batch whose bucket is
    not ready takes the factor of all steps.
    """

    __slots__ = ("_all", "_buckets", "_drafts", "_factors", "_log_bounds", "_otherwise", "config")

    def __init__(self, config: CorrectionConfig | None = None) -> None:
        self.config = config or CorrectionConfig()
        self._log_bounds = math.log(self.config.lowest), math.log(self.config.highest)
        self._buckets: dict[int, tuple[int, float]] = {}
        self._factors: dict[int, float] = {}
        self._all = 0, 0.0
        self._drafts = DraftSurcharge()
        self._otherwise = 1.0

    def factor(self, shape: BatchShape) -> float:
        """Return the factor on the prediction for a batch; without drafts, 1 until its bucket is ready."""
        factor = self._factors.get(_key(shape), self._otherwise)
        return factor * self._drafts.factor(shape) if shape.num_draft_tokens else factor

    def observe(self, shape: BatchShape, ratio: float) -> None:
        """Learn from one step.

        Parameters
        ----------
        ratio : measured / predicted without this correction; positive and finite.
        """
        low, high = self._log_bounds
        value = min(max(math.log(ratio), low), high)
        key, weight, ready_after = _key(shape), self.config.weight, self.config.ready_after
        has_drafts = shape.num_draft_tokens > 0
        count, mean = self._all = _follow(self._all, value, weight)
        if count >= ready_after and (has_drafts or self._drafts.is_in_use):
            self._otherwise = math.exp(mean)
        if has_drafts:
            self._drafts.observe(shape, value - math.log(self._factors.get(key, self._otherwise)))
            return
        count, mean = self._buckets[key] = _follow(self._buckets.get(key, _NOTHING), value, weight)
        if count >= ready_after:
            self._factors[key] = math.exp(mean)


class DraftSurcharge:
    """What steps with drafts take beyond their prediction, over what the same rows take without.

    The host's work for drafts is in no fitted model, and the fit itself is a little wrong. By powers of two
    of the rows, each believed to be like all until it has shown otherwise.
    """

    __slots__ = ("_all", "_by_size", "_factors", "is_in_use")

    def __init__(self) -> None:
        self.is_in_use = False
        self._all = _NOTHING
        self._by_size: dict[int, tuple[int, float]] = {}
        self._factors: dict[int, float] = {}

    def factor(self, shape: BatchShape) -> float:
        """Return the factor for a batch with drafts; 1 while nothing is known."""
        return self._factors.get((shape.num_new_tokens - shape.num_draft_tokens).bit_length(), 1.0)

    def observe(self, shape: BatchShape, value: float) -> None:
        """Learn from a step with drafts.

        Parameters
        ----------
        value : log of measured / predicted, with the factor of the same rows without drafts.
        """
        self.is_in_use = True
        size = (shape.num_new_tokens - shape.num_draft_tokens).bit_length()
        of_all, overall = self._all = _follow(self._all, value, _DRAFT_WEIGHT)
        count, mean = self._by_size[size] = _follow(self._by_size.get(size, _NOTHING), value, _DRAFT_WEIGHT)
        overall *= of_all / (of_all + _DRAFT_PRIOR)
        self._factors[size] = math.exp((_DRAFT_PRIOR * overall + count * mean) / (_DRAFT_PRIOR + count))


_NOTHING = (0, 0.0)
_DRAFT_WEIGHT = 1 / 64
"""Share of the newest step in what drafts cost."""
_DRAFT_PRIOR = 16
"""Steps that the wider group counts for beside a size's own."""


def _key(shape: BatchShape) -> int:
    """Return the bucket of a batch, or of the same rows without their drafts."""
    drafts = shape.num_draft_tokens
    context_tokens = shape.chunk_cached_tokens + shape.decode_context_tokens - drafts
    return (shape.num_new_tokens - drafts).bit_length() * _KEY_STRIDE + context_tokens.bit_length()


def _follow(seen: tuple[int, float], value: float, weight: float) -> tuple[int, float]:
    """Return the number of steps and their mean with one step more; at first it is the plain mean."""
    count, mean = seen
    return count + 1, mean + (value - mean) * max(weight, 1 / (count + 1))


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
