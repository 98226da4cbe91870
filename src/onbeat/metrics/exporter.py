"""Give the counts their Prometheus names: `onbeat_...` in base units and vLLM's on request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from onbeat.metrics.counts import RunCounts
from onbeat.metrics.histogram import Histogram

Labels = Mapping[str, str]


class MetricsExporter(Collector):
    """A Prometheus collector over `RunCounts`, with a registry of its own.

    Parameters
    ----------
    counts : what a `RequestTracker` feeds.
    model_name : label of the aliases.
    aliases : `vllm` adds the metrics of vLLM that this server can fill truthfully.
    """

    def __init__(self, counts: RunCounts, *, model_name: str, aliases: Literal["vllm"] | None = None) -> None:
        self._counts = counts
        self._labels = {"model_name": model_name, "engine": "0"}
        self._aliases = aliases
        self._http: Counter[tuple[str, str]] = Counter()
        self._stream_errors: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def count_http(self, endpoint: str, status: int) -> None:
        """Count one HTTP request; 499 stands for a client that left."""
        self._http[endpoint, str(status)] += 1

    def count_stream_error(self, code: str) -> None:
        """Count one stream that began with status 200 and ended with an error event."""
        self._stream_errors[code] += 1

    def render(self) -> tuple[bytes, str]:
        """Return the text that Prometheus reads, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they stand."""
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        if self._aliases == "vllm":
            yield from self._vllm_scalars()
            yield from self._vllm_histograms()

    def _gauges(self) -> Iterator[Metric]:
        counts = self._counts
        yield _gauge("onbeat_requests_running", "Requests in the batch", counts.num_running)
        yield _gauge("onbeat_requests_waiting", "Requests in the queue", counts.num_waiting)
        yield _gauge("onbeat_kv_blocks_used", "KV cache blocks held by requests", counts.num_used_blocks)
        yield _gauge("onbeat_kv_blocks", "KV cache blocks in all", counts.num_blocks)
        for name, text, value in (
            ("step_mbu_ratio", "Of the memory bandwidth, what the last step used", counts.last_mbu),
            ("step_mfu_ratio", "Of the peak arithmetic rate, what the last step used", counts.last_mfu),
            (
                "step_prediction_bias_ratio",
                "Typical actual / predicted time of recent steps",
                counts.prediction_bias,
            ),
            (
                "step_prediction_drift",
                "1 while steps have left the uncorrected step-time model",
                None if counts.is_drifting is None else float(counts.is_drifting),
            ),
        ):
            if value is not None:
                yield _gauge(f"onbeat_{name}", text, value)

    def _counters(self) -> Iterator[Metric]:
        counts = self._counts
        yield _counter(
            "onbeat_prompt_tokens", "Prompt tokens of requests that were prefilled", counts.num_prompt_tokens
        )
        yield _counter(
            "onbeat_prompt_tokens_cached",
            "Of these, tokens that the prefix cache held",
            counts.num_cached_tokens,
        )
        yield _counter("onbeat_output_tokens", "Tokens generated", counts.num_output_tokens)
        yield _counter("onbeat_steps", "Forward passes", counts.num_steps)
        yield _counter(
            "onbeat_preemptions", "Requests put back in the queue for want of blocks", counts.num_preemptions
        )
        yield _counter(
            "onbeat_prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            counts.num_prefix_queries,
        )
        yield _counter("onbeat_prefix_cache_hits", "Of these, tokens found", counts.num_prefix_hits)
        yield _labelled("onbeat_requests", "Ended requests", ("finish_reason",), _keyed(counts.finished))
        yield _labelled("onbeat_http_requests", "Answered HTTP requests", ("endpoint", "status"), self._http)
        yield _labelled(
            "onbeat_stream_errors",
            "Streams that ended with an error event",
            ("code",),
            _keyed(self._stream_errors),
        )

    def _histograms(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Arrival to first delivery", counts.ttft),
            ("time_between_tokens_seconds", "Gap between two deliveries of a request", counts.gap),
            ("time_per_output_token_seconds", "Mean gap per token of a request", counts.tpot),
            ("request_e2e_seconds", "Arrival to end of whole answers", counts.e2e),
            ("request_queue_seconds", "Arrival to first step", counts.queue),
            ("request_prefill_seconds", "First step to first delivery", counts.prefill),
            ("request_decode_seconds", "First to last delivery", counts.decode),
            ("request_prompt_tokens", "Prompt length of whole answers", counts.prompt_lengths),
            ("request_output_tokens", "Output length of whole answers", counts.output_lengths),
            ("step_seconds", "Length of a step", counts.step),
            ("step_predicted_seconds", "What the step-time model expected of a step", counts.predicted_step),
            (
                "step_prediction_error_ratio",
                "Distance of predicted from actual step time, as a share of the actual",
                counts.prediction_error,
            ),
            ("step_mbu", "Share of the memory bandwidth that a step used", counts.mbu),
            ("step_mfu", "Share of the peak arithmetic rate that a step used", counts.mfu),
            ("step_decodes", "Decode rows of a step", counts.step_decodes),
            ("step_chunk_tokens", "Prompt tokens of a step", counts.step_chunk_tokens),
            ("step_rows", "Requests in a step", counts.step_rows),
            ("schedule_seconds", "Planning one step", counts.schedule),
            ("update_seconds", "Taking in the results of one step", counts.update),
        ):
            yield _histogram(f"onbeat_{name}", text, histogram)

    def _vllm_scalars(self) -> Iterator[Metric]:
        counts, labels = self._counts, self._labels
        usage = counts.num_used_blocks / counts.num_blocks if counts.num_blocks else 0.0
        yield _gauge("vllm:num_requests_running", "As in vLLM", counts.num_running, labels)
        yield _gauge("vllm:num_requests_waiting", "As in vLLM", counts.num_waiting, labels)
        yield _gauge("vllm:kv_cache_usage_perc", "As in vLLM: 1 is full", usage, labels)
        yield _counter("vllm:prompt_tokens", "As in vLLM", counts.num_prompt_tokens, labels)
        yield _counter("vllm:prompt_tokens_cached", "As in vLLM", counts.num_cached_tokens, labels)
        yield _counter("vllm:generation_tokens", "As in vLLM", counts.num_output_tokens, labels)
        yield _counter("vllm:num_preemptions", "As in vLLM", counts.num_preemptions, labels)
        yield _counter("vllm:prefix_cache_queries", "As in vLLM", counts.num_prefix_queries, labels)
        yield _counter("vllm:prefix_cache_hits", "As in vLLM", counts.num_prefix_hits, labels)
        finished = {(*labels.values(), reason): number for reason, number in counts.finished.items()}
        yield _labelled("vllm:request_success", "As in vLLM", (*labels, "finished_reason"), finished)

    def _vllm_histograms(self) -> Iterator[Metric]:
        counts = self._counts
        for name, histogram in (
            ("time_to_first_token_seconds", counts.ttft),
            ("inter_token_latency_seconds", counts.gap),
            ("request_time_per_output_token_seconds", counts.tpot),
            ("e2e_request_latency_seconds", counts.e2e),
            ("request_queue_time_seconds", counts.queue),
            ("request_prefill_time_seconds", counts.prefill),
            ("request_decode_time_seconds", counts.decode),
            ("request_inference_time_seconds", counts.inference),
            ("request_prompt_tokens", counts.prompt_lengths),
            ("request_generation_tokens", counts.output_lengths),
            ("iteration_tokens_total", counts.step_tokens),
        ):
            yield _histogram(f"vllm:{name}", "As in vLLM", histogram, self._labels)


def _gauge(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    labels = labels or {}
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, labels: Labels | None = None) -> Metric:
    labels = labels or {}
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _keyed(counter: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(key,): number for key, number in counter.items()}


def _labelled(
    name: str,
    text: str,
    labels: tuple[str, ...],
    counter: Mapping[tuple[str, ...], int] | Counter[tuple[str, str]],
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in counter.items():
        family.add_metric(values, number)
    return family


def _histogram(name: str, text: str, histogram: Histogram, labels: Labels | None = None) -> Metric:
    labels = labels or {}
    family = HistogramMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
    return family
