"""Count what steps and requests do. Plain numbers; `metrics.exporter` gives them names for Prometheus."""

from __future__ import annotations

import math
from collections import Counter

from onbeat.core.step import StepStats
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.record import RequestRecord

REQUEST_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
GAP_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
HOST_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
TOKENS = tuple(float(2**power) for power in range(18))
ERROR_RATIOS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
BIAS_MEMORY = 64
"""Steps over which the bias of predictions forgets."""
ROWS = tuple(float(2**power) for power in range(11))


class RunCounts:
    """A `metrics.tracker.RunListener` that counts."""

    def __init__(self) -> None:
        self.num_open = 0
        """Requests that have not ended."""
        self._step_running = 0
        self._step_used_blocks = 0
        self.num_blocks = 0
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.finished = Counter({"stop": 0, "length": 0, "abort": 0, "error": 0})
        """Requests by finish reason."""
        self.ttft = Histogram(REQUEST_SECONDS)
        self.gap = Histogram(GAP_SECONDS)
        self.tpot = Histogram(GAP_SECONDS)
        self.e2e = Histogram(REQUEST_SECONDS)
        self.queue = Histogram(REQUEST_SECONDS)
        self.prefill = Histogram(REQUEST_SECONDS)
        self.decode = Histogram(REQUEST_SECONDS)
        self.inference = Histogram(REQUEST_SECONDS)
        self.prompt_lengths = Histogram(TOKENS)
        self.output_lengths = Histogram(TOKENS)
        self.step = Histogram(GAP_SECONDS)
        self.step_tokens = Histogram(TOKENS)
        self.step_decodes = Histogram(ROWS)
        self.step_chunk_tokens = Histogram(TOKENS)
        self.step_rows = Histogram(ROWS)
        self.predicted_step = Histogram(GAP_SECONDS)
        self.prediction_error = Histogram(ERROR_RATIOS)
        """|predicted - actual| / actual."""
        self.mbu = Histogram(SHARES)
        self.mfu = Histogram(SHARES)
        self.last_mbu: float | None = None
        self.last_mfu: float | None = None
        self.is_drifting: bool | None = None
        self._log_bias = 0.0
        self._num_predicted = 0
        self.schedule = Histogram(HOST_SECONDS)
        self.update = Histogram(HOST_SECONDS)

    @property
    def prediction_bias(self) -> float | None:
        """Typical actual / predicted time of recent steps; None where no step was predicted."""
        return math.exp(self._log_bias) if self._num_predicted else None

    @property
    def num_running(self) -> int:
        """Requests in the batch: as of the last step, less those that have left since."""
        return min(self._step_running, self.num_open)

    @property
    def num_waiting(self) -> int:
        """Open requests that are not in the batch."""
        return self.num_open - self.num_running

    @property
    def num_used_blocks(self) -> int:
        """Blocks held as of the last step; none once no request is open."""
        return self._step_used_blocks if self.num_open else 0

    def on_request(self, _record: RequestRecord) -> None:
        """Count an open request; the rest waits until it has run."""
        self.num_open += 1

    def on_preemption(self, _record: RequestRecord, _now: float) -> None:
        """Preemptions are counted by step, those of unknown requests included."""

    def on_delivery(self, record: RequestRecord) -> None:
        """Count tokens, and the time since the delivery before or since the arrival."""
        self.num_output_tokens += record.delivery_sizes[-1]
        times = record.delivery_times
        if len(times) > 1:
            self.gap.observe(times[-1] - times[-2])
            return
        first = times[0]
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.ttft.observe(first - record.arrival)
        if record.scheduled is not None:
            self.queue.observe(record.scheduled - record.arrival)
            self.prefill.observe(first - record.scheduled)

    def on_finish(self, record: RequestRecord) -> None:
        """Count a request; only a whole answer has latencies."""
        self.num_open -= 1
        self.finished[record.finish_reason or "error"] += 1
        if not record.is_completed or not record.delivery_times:
            return
        self.e2e.observe(record.e2e)
        self.prompt_lengths.observe(record.num_prompt_tokens)
        self.output_lengths.observe(record.num_output_tokens)
        self.decode.observe(record.delivery_times[-1] - record.delivery_times[0])
        if record.tpot is not None:
            self.tpot.observe(record.tpot)
        if record.scheduled is not None:
            self.inference.observe(record.delivery_times[-1] - record.scheduled)

    def on_step(self, stats: StepStats) -> None:
        """Count a step."""
        shape = stats.shape
        self._step_running = stats.num_running
        self._step_used_blocks = stats.num_used_blocks
        self.num_blocks = stats.num_blocks
        self.num_steps += 1
        self.num_preemptions += stats.num_preemptions
        self.num_prefix_queries += stats.num_prefix_queries
        self.num_prefix_hits += stats.num_prefix_hits
        seconds = stats.end - stats.start
        self.step.observe(seconds)
        if stats.predicted_seconds is not None and seconds > 0:
            self._count_prediction(stats.predicted_seconds, seconds)
        self.is_drifting = stats.is_drifting
        if stats.mbu is not None and stats.mfu is not None:
            self.last_mbu, self.last_mfu = stats.mbu, stats.mfu
            self.mbu.observe(stats.mbu)
            self.mfu.observe(stats.mfu)
        self.step_tokens.observe(shape.num_new_tokens)
        self.step_decodes.observe(shape.num_decodes)
        self.step_chunk_tokens.observe(shape.num_new_tokens - shape.num_decodes)
        self.step_rows.observe(shape.num_sequences)
        self.schedule.observe(stats.schedule_seconds)
        self.update.observe(stats.update_seconds)

    def _count_prediction(self, predicted: float, actual: float) -> None:
        self._num_predicted += 1
        self.predicted_step.observe(predicted)
        self.prediction_error.observe(abs(predicted - actual) / actual)
        # The plain mean until there are enough steps to forget the first.
        memory = min(self._num_predicted, BIAS_MEMORY)
        self._log_bias += (math.log(actual / predicted) - self._log_bias) / memory
