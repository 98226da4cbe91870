"""From the load of a model server to the latency of one more request, and what measured requests teach.

A step-time model says how long a batch takes. TTFT is the steps in which the prompts ahead of a request and
its own are computed. TPOT is one step of the decodes that run. A factor on each is learnt from the latencies
that the router measures: it stands for queues and bursts, which the load does not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from onbeat.core.step import BatchShape
from onbeat.perfmodel.predictor import OnlineCorrection, Predictor
from onbeat.perfmodel.recent import Drift, DriftAlarm, OnlineQuantile

_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]

_MEAN_MEMORY = 64
"""Requests over which the mean length of prompts forgets."""


class Features(msgspec.Struct, kw_only=True, frozen=True):
    """How a model server stands, and what it is to take: the fields of llm-d's requests."""

    kv_cache_percentage: _Share
    """Share of its KV cache that is in use; 1 is full."""
    input_token_length: _Count
    num_request_waiting: _Count
    num_request_running: _Count
    num_tokens_generated: _Count
    prefix_cache_score: _Share
    """Share of the prompt that its prefix cache holds."""
    pod_type: str | None = ""
    """`prefill`, `decode`, or empty where it does both."""
    prefill_tokens_in_flight: _Count = 0
    """Prompt tokens sent to it whose first token has not come; 0 where nobody counts them."""
    decode_tokens_in_flight: _Count = 0

    @property
    def num_uncached(self) -> int:
        """Prompt tokens that must be computed, at least one."""
        return max(round(self.input_token_length * (1 - self.prefix_cache_score)), 1)


class Measured(Features, kw_only=True, frozen=True):
    """Features, and the latency that was then measured; 0 where it was not."""

    actual_ttft_ms: _Milliseconds
    actual_tpot_ms: _Milliseconds


class Latency(NamedTuple):
    """Seconds."""

    ttft: float
    tpot: float


class Expectation(NamedTuple):
    """What the step-time model alone says."""

    seconds: float
    shape: BatchShape
    """A batch that stands for the case, for what is learnt of its kind."""


class Term:
    """One latency: a factor that measured requests teach, and how far they scatter.

    Parameters
    ----------
    predictor : for the scatter of steps, until requests have been measured.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._correction = OnlineCorrection()
        self._scatter = OnlineQuantile(window=1024, ready_after=64)
        self._alarm = DriftAlarm()
        self.num_measured = 0
        self.num_within = 0
        """Of these, no longer than the quantile that was predicted."""

    @property
    def drift(self) -> Drift:
        """Typical measured / predicted, this correction left out."""
        return self._alarm.state

    def predict(self, expected: Expectation, quantile: float | None) -> float:
        """Return the time, or its quantile; seconds."""
        seconds = expected.seconds * self._correction.factor(expected.shape)
        return seconds if quantile is None else seconds * self._spread(expected.shape, quantile)

    def observe(self, expected: Expectation, seconds: float, quantile: float | None) -> float:
        """Learn from a measured time; return what was predicted of it, seconds."""
        predicted = self.predict(expected, quantile)
        self.num_measured += 1
        self.num_within += seconds <= predicted
        ratio = seconds / expected.seconds
        had_lost_pace = self._correction.has_lost_pace
        factor = self._correction.observe(expected.shape, ratio)
        if self._correction.has_lost_pace:
            self._scatter.forget()
        elif not had_lost_pace:
            self._scatter.observe(ratio / factor)
        self._alarm.observe(ratio)
        return predicted

    def _spread(self, shape: BatchShape, quantile: float) -> float:
        measured = self._scatter.factor(quantile)
        if measured is not None:
            return measured
        return self._predictor.step_time(shape, quantile) / self._predictor.step_time(shape)


class LatencyModel:
    """Predicts the latencies of one kind of model server, and learns.

    Parameters
    ----------
    predictor : of its steps.
    num_kv_tokens : tokens that its KV cache holds.
    max_num_batched_tokens : most tokens of one of its steps.
    """

    def __init__(self, predictor: Predictor, *, num_kv_tokens: int, max_num_batched_tokens: int) -> None:
        self._predictor = predictor
        self._num_kv_tokens = num_kv_tokens
        self._budget = max_num_batched_tokens
        self.forget()

    def forget(self) -> None:
        """Know the profile alone."""
        self._mean_uncached: float | None = None
        self._num_lengths = 0
        self.terms = {name: Term(self._predictor) for name in ("ttft", "ttft_queued", "tpot")}
        """TTFT where nobody waits and where somebody does, and TPOT."""

    def predict(self, features: Features, quantile: float | None) -> Latency:
        """Return the latencies of one more request; their quantiles, or their means for None."""
        return self.predict_each(features, (quantile,))[0]

    def predict_each(self, features: Features, quantiles: Sequence[float | None]) -> list[Latency]:
        """Return the same for several quantiles; the step times behind them are computed once."""
        ttft, tpot = self._ttft(features), self._tpot(features)
        of_ttft, of_tpot = self._ttft_term(features), self.terms["tpot"]
        return [Latency(of_ttft.predict(ttft, each), of_tpot.predict(tpot, each)) for each in quantiles]

    def learn(self, entry: Measured, quantile: float | None) -> Latency:
        """Learn from a measured request; return what was predicted of what was measured, else 0."""
        predicted = [0.0, 0.0]
        if entry.actual_ttft_ms > 0:
            term = self._ttft_term(entry)
            predicted[0] = term.observe(self._ttft(entry), entry.actual_ttft_ms / 1e3, quantile)
            self._num_lengths = min(self._num_lengths + 1, _MEAN_MEMORY)
            mean = self._mean_uncached or 0.0
            self._mean_uncached = mean + (entry.num_uncached - mean) / self._num_lengths
        if entry.actual_tpot_ms > 0:
            predicted[1] = self.terms["tpot"].observe(self._tpot(entry), entry.actual_tpot_ms / 1e3, quantile)
        return Latency(*predicted)

    def _ttft_term(self, features: Features) -> Term:
        return self.terms["ttft_queued" if features.num_request_waiting else "ttft"]

    def _decodes(self, features: Features, num_more: int) -> BatchShape:
        num = features.num_request_running + num_more
        context = round(features.kv_cache_percentage * self._num_kv_tokens)
        return BatchShape.of_decodes(num, max(context, num) + num_more * features.input_token_length)

    def _tpot(self, features: Features) -> Expectation:
        shape = self._decodes(features, 1)
        shape.decode_context_tokens += features.num_tokens_generated
        return Expectation(self._predictor.step_time(shape), shape)

    def _ttft(self, features: Features) -> Expectation:
        server = self._predictor.server
        if features.pod_type == "decode":  # its prompt comes computed
            shape = self._decodes(features, 1)
            return Expectation(self._predictor.step_time(shape) + server.request_seconds, shape)
        decodes = self._decodes(features, 0)
        num_left = self._num_ahead(features) + features.num_uncached
        most = max(self._budget - decodes.num_new_tokens, 1)
        num_full, num_rest = divmod(num_left, most)
        cached = features.input_token_length - features.num_uncached
        seconds = server.request_seconds
        last = self._with_chunk(decodes, cached, num_rest or most)
        last_seconds = self._predictor.step_time(last)
        if num_full - (num_rest == 0) > 0:
            full = self._with_chunk(decodes, cached + features.num_uncached // 2, most)
            seconds += (num_full - (num_rest == 0)) * self._predictor.step_time(full)
        seconds += last_seconds
        if decodes.num_new_tokens:  # it comes in the middle of a step, and behind those that are planned
            seconds += (0.5 + server.steps_ahead) * self._predictor.step_time(decodes)
        shape = decodes.copy()
        shape.add(cached, max(num_left, 2), samples=True)
        return Expectation(seconds, shape)

    def _num_ahead(self, features: Features) -> int:
        """Return the prompt tokens that are computed before the request's own."""
        if features.prefill_tokens_in_flight or not features.num_request_waiting:
            return features.prefill_tokens_in_flight
        usual = features.num_uncached if self._mean_uncached is None else self._mean_uncached
        return round(features.num_request_waiting * usual)

    @staticmethod
    def _with_chunk(decodes: BatchShape, cached: int, num_tokens: int) -> BatchShape:
        shape = decodes.copy()
        shape.add(cached, num_tokens, samples=True)
        return shape
