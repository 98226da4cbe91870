"""What a prompt costs, as two coefficients of the step-time model, so that a queue is summed up quickly."""

from __future__ import annotations

from onbeat.core.step import BatchShape
from onbeat.core.step_time import StepTimeModel

_SMALLEST_CHUNK = 32
_LARGEST_CHUNK = 4096
_CONTEXT = 2048
_DECODE_CONTEXT = 1024
_NEAR_BEST = 1.05
"""A chunk is large enough if no other is cheaper a token by more than this."""
_MOST_STEPS_BETWEEN = 256
"""Steps after which the coefficients are taken again, from a model that has learned meanwhile; at the start
it learns quickly, so the first times come sooner."""


class PrefillWork:
    """Seconds of prefill work: `token n + pair (n h + n^2 / 2)` for n tokens after h cached ones.

    This is what a prompt adds to steps that are long enough to be bound by arithmetic, beside
    `step_seconds` for each step.

    Attributes
    ----------
    efficient_chunk : the shortest chunk at which a token costs next to the least; longer ones gain nothing.
    step_seconds : of a step's time, what does not grow with its tokens.
    shortest_step : a step with a single token.
    decode_seconds : what one more decode of a typical context adds to a step.
    """

    def __init__(self) -> None:
        self.efficient_chunk = _LARGEST_CHUNK
        self.step_seconds = 0.0
        self.shortest_step = 0.0
        self.decode_seconds = 0.0
        self._token = 0.0
        self._pair = 0.0
        self._num_steps = 0
        self._steps_between = 8

    def refresh(self, model: StepTimeModel, q: float | None) -> None:
        """Take the coefficients from the model, if it is time."""
        self._num_steps -= 1
        if self._num_steps > 0:
            return
        self._steps_between = min(2 * self._steps_between, _MOST_STEPS_BETWEEN)
        self._num_steps = self._steps_between
        times: dict[int, float] = {}
        size = _SMALLEST_CHUNK
        while size <= _LARGEST_CHUNK:
            times[size] = chunk_seconds(model, 0, size, q)
            size *= 2
        best = min(seconds / size for size, seconds in times.items())
        chunk = next(size for size, seconds in times.items() if seconds <= best * size * _NEAR_BEST)
        self.efficient_chunk = chunk
        self.shortest_step = chunk_seconds(model, 0, 1, q)
        self.decode_seconds = _decode_seconds(model, q)
        with_context = chunk_seconds(model, _CONTEXT, chunk, q)
        self._pair = max(0.0, (with_context - times[chunk]) / (chunk * _CONTEXT))
        longer = times.get(2 * chunk) or chunk_seconds(model, 0, 2 * chunk, q)
        slope = (longer - times[chunk]) / chunk - self._pair * 1.5 * chunk
        self._token = min(max(slope, 0.5 * best), best)
        self.step_seconds = max(0.0, times[chunk] - self.seconds(chunk, 0))

    @property
    def coefficients(self) -> tuple[float, float]:
        """`token` and `pair`, for loops in which a call each would count."""
        return self._token, self._pair

    def seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Return the work of `num_tokens` after `num_cached_tokens`."""
        return num_tokens * (self._token + self._pair * (num_cached_tokens + 0.5 * num_tokens))

    def idle_seconds(self, num_tokens: int, num_cached_tokens: int) -> float:
        """Return about how long the tokens take where nothing else runs."""
        return self.step_seconds + self.seconds(num_tokens, num_cached_tokens)

    def recompute_seconds(self, num_cached_tokens: int, num_tokens: int) -> float:
        """Return what computing lost tokens again takes."""
        return self.idle_seconds(num_tokens, num_cached_tokens)


def chunk_seconds(model: StepTimeModel, num_cached: int, num_tokens: int, q: float | None) -> float:
    """Return the time of a step with one chunk alone."""
    shape = BatchShape()
    shape.add(num_cached, num_tokens, samples=True)
    return model.step_time(shape, q)


def _decode_seconds(model: StepTimeModel, q: float | None) -> float:
    few, many = BatchShape(), BatchShape()
    for shape, num_decodes in ((few, 16), (many, 32)):
        for _ in range(num_decodes):
            shape.add(_DECODE_CONTEXT, 1, samples=True)
    return max(0.0, (model.step_time(many, q) - model.step_time(few, q)) / 16)
