"""What prompts cost, as two coefficients of the step-time model, so that a queue is summed up quickly."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from math import inf, sqrt

from onbeat.core.errors import ConfigError
from onbeat.core.fleet import USUAL_CONTEXT, PrefillCosts
from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel, TimesOfShapes
from onbeat.scheduler.triage import LEAST_SHARE, PrefillShare

_NEAR_BEST = 1.05
"""A chunk is large enough if no other is cheaper a token by more than this."""
_REFRESH_STEPS = 16
"""Steps after which the coefficients are taken again from a model that has learnt meanwhile: some 15
questions, which take a few per cent of the time that these steps are planned in."""
CERTAIN = 0.99
"""Quantile of what a step is certain to take no longer than: one token in a hundred may be late."""


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
        self._probe = model.times_of if isinstance(model, TimesOfShapes) else self._ask_each
        self.take()

    def _ask_each(self, shapes: tuple[BatchShape, ...], quantile: float | None) -> list[float]:
        return [self._model.step_time(shape, quantile) for shape in shapes]

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
        probed = self._probe(_PROBES, self._quantile)
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
        decode = max(0.0, (many - few) / 16)
        context = max(0.0, (many - short) / (32 * USUAL_CONTEXT - 32 * USUAL_CONTEXT // 8))
        self.costs = PrefillCosts(
            token=token,
            pair=pair,
            step=max(0.0, times[place] - chunk * (token + pair * (0.5 * chunk))),
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
        done = self.seconds(chunk, 0)
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
