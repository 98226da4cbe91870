"""Give the counts their Prometheus names: `onbeat_...` in base units and vLLM's on request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from onbeat import __version__
from onbeat.core.protocols import EngineClient, FleetView
from onbeat.metrics.buckets import LAG_SECONDS
from onbeat.metrics.counts import AskedCounts, GrammarCounts, JobCounts, RunCounts
from onbeat.metrics.exporter_fleet import fleet_metrics
from onbeat.metrics.exporter_slo import slo_metrics
from onbeat.metrics.exporter_speculation import speculation_metrics
from onbeat.metrics.exporter_vllm import vllm_cache, vllm_metrics, vllm_requests
from onbeat.metrics.families import counter, counters, gauge, histogram
from onbeat.metrics.fleet_counts import FleetCounts
from onbeat.metrics.histogram import Histogram
from onbeat.output import num_dropped_lines


class MetricsExporter(Collector):
    """A Prometheus collector over `RunCounts`, with a registry of its own.

    Parameters
    ----------
    counts : what a `RequestTracker` feeds.
    model_name, policy : what is served, and how; shown as they are.
    proposer : what proposes draft tokens, as metrics label it; None where nothing is speculated.
    aliases : `vllm` adds the metrics of vLLM that this server can fill truthfully.
    fleet_counts : what a fleet does with requests; None where there is none.
    clock : the clock of steps and requests, seconds.

    Attributes
    ----------
    asked : what requests for answers ask for; the server counts it.
    """

    def __init__(  # noqa: PLR0913 -- what is served, and where its numbers are
        self,
        counts: RunCounts,
        *,
        model_name: str,
        policy: str = "",
        proposer: str | None = None,
        aliases: Literal["vllm"] | None = None,
        fleet_counts: FleetCounts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts = counts
        self.asked = AskedCounts()
        self._info = {
            "version": __version__,
            "model": model_name,
            "policy": policy,
            "slo_mode": counts.slo.mode,
        }
        self._proposer = proposer
        self._aliases = aliases
        self._clock = clock
        self._start = clock()
        self._engine: EngineClient | None = None
        self._fleet: FleetView | None = None
        self._fleet_counts = fleet_counts or FleetCounts()
        self._http: Counter[tuple[str, ...]] = Counter()
        self._stream_errors: Counter[str] = Counter()
        self._rate_limited: Counter[str] = Counter()
        self._loop_lag = Histogram(LAG_SECONDS)
        self._refused_connections: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def watch(self, engine: EngineClient, fleet: FleetView | None = None) -> None:
        """Export the signs of life of an engine from now on; its pulse must be of the same clock.

        Parameters
        ----------
        fleet : the replicas behind it.
        """
        self._engine, self._fleet = engine, fleet

    def count_http(self, endpoint: str, status: int) -> None:
        """Count one HTTP request; 499 stands for a client that left."""
        self._http[endpoint, str(status)] += 1

    def count_stream_error(self, code: str) -> None:
        """Count one stream that began with status 200 and ended with an error event."""
        self._stream_errors[code] += 1

    def count_rate_limited(self, limit: str) -> None:
        """Count one request that was refused as its API key had reached a limit."""
        self._rate_limited[limit] += 1

    def observe_loop_lag(self, seconds: float) -> None:
        """Count by how much later than it was due the server's event loop did something."""
        self._loop_lag.observe(seconds)

    def count_refused_connection(self, reason: str) -> None:
        """Count one connection that was closed before its request was complete."""
        self._refused_connections[reason] += 1

    def render(self) -> tuple[bytes, str]:
        """Return the text that Prometheus reads, and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics as they stand."""
        if self._fleet is not None:
            serving = {each.replica for each in self._fleet.replicas() if each.state in ("ready", "draining")}
            self._counts.keep_engines(serving)
        yield gauge("onbeat_server_info", "What is served, and how; always 1", 1, self._info)
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()
        now = self._clock()
        yield from slo_metrics(self._counts, now, uptime=now - self._start)
        yield from _grammars(self._counts.grammars)
        yield from _jobs(self._counts.jobs)
        if self._engine is not None:
            yield from _signs_of_life(self._engine, now)
        if self._fleet is not None:
            yield from fleet_metrics(self._fleet, self._fleet_counts, self._counts)
        if self._proposer is not None:
            yield from speculation_metrics(self._counts.speculation, self._proposer)
        if self._aliases == "vllm":
            speculates = self._proposer is not None
            yield from vllm_metrics(self._counts, self._info["model"], speculates=speculates)
            yield from vllm_requests(self._counts, self.asked, self._info["model"])
            if self._engine is not None:
                yield vllm_cache(self._engine.info)

    def _gauges(self) -> Iterator[Metric]:
        counts = self._counts
        yield gauge("onbeat_requests_running", "Requests in the batch", counts.num_running)
        yield gauge("onbeat_requests_waiting", "Requests in the queue", counts.num_waiting)
        yield gauge("onbeat_kv_blocks_used", "KV cache blocks held by requests", counts.num_used_blocks)
        yield gauge("onbeat_kv_blocks_kept", "KV cache blocks kept for calls to come", counts.num_kept_blocks)
        yield gauge("onbeat_kv_blocks", "KV cache blocks in all", counts.num_blocks)
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
                yield gauge(f"onbeat_{name}", text, value)

    def _counters(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of requests that were prefilled", counts.num_prompt_tokens),
            ("prompt_tokens_cached", "Of these, tokens that the prefix cache held", counts.num_cached_tokens),
            ("output_tokens", "Output tokens of answers", counts.num_output_tokens),
            ("steps", "Forward passes", counts.num_steps),
            ("preemptions", "Requests put back in the queue for want of blocks", counts.num_preemptions),
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache",
                counts.num_prefix_queries,
            ),
            ("prefix_cache_hits", "Of these, tokens found", counts.num_prefix_hits),
            (
                "log_lines_dropped",
                "Lines that the server's process printed and nobody took",
                num_dropped_lines(),
            ),
        ):
            yield counter(f"onbeat_{name}", text, value)
        refused = self._refused_connections
        for name, text, label, values in (
            ("embeddings", "Texts embedded", "class", counts.embeddings),
            ("embedding_tokens", "Tokens of these texts", "class", counts.embedding_tokens),
            ("requests", "Ended requests", "finish_reason", counts.finished),
            ("stream_errors", "Streams that ended with an error event", "code", self._stream_errors),
            (
                "rate_limited",
                "Requests refused as their API key had reached a limit",
                "limit",
                self._rate_limited,
            ),
            (
                "http_connections_refused",
                "Connections closed before a request was complete",
                "reason",
                refused,
            ),
        ):
            yield counters(f"onbeat_{name}", text, label, values)
        yield counters("onbeat_http_requests", "Answered HTTP requests", ("endpoint", "status"), self._http)

    def _histograms(self) -> Iterator[Metric]:
        counts = self._counts
        for name, text, values in (
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
            ("planner_seconds", "Planning one step", counts.schedule),
            ("update_seconds", "Taking in the results of one step", counts.update),
            ("first_token_lag_seconds", "From a step to a first token's hand-over", counts.first_token_lag),
            ("event_loop_lag_seconds", "How late the server's event loop is", self._loop_lag),
        ):
            yield histogram(f"onbeat_{name}", text, values)


def _signs_of_life(engine: EngineClient, now: float) -> Iterator[Metric]:
    pulse = engine.pulse
    step_age = 0.0 if pulse.step_start is None else now - pulse.step_start
    for name, text, value in (
        ("engine_alive", "1 while the engine process lives, 0 once it has ended", float(engine.is_alive)),
        ("engine_silence_seconds", "Since the engine's last sign of life", now - pulse.time),
        (
            "engine_step_age_seconds",
            "Of the step that ran at the last sign of life, since its begin",
            step_age,
        ),
    ):
        yield gauge(f"onbeat_{name}", text, value)


def _jobs(counts: JobCounts) -> Iterator[Metric]:
    yield gauge("onbeat_jobs_open", "Jobs of which calls may follow", counts.num_open)
    yield counters("onbeat_jobs", "Ended jobs, by what became of them", "outcome", counts.ended)
    yield counters(
        "onbeat_job_seconds",
        "Seconds of ended jobs, in calls and between them",
        "part",
        {"in_calls": counts.in_calls, "between": counts.between},
    )


def _grammars(counts: GrammarCounts) -> Iterator[Metric]:
    """Yield the metrics of answers that must match something."""
    yield counters(
        "onbeat_guided_tokens",
        "Tokens under a grammar, as sampled: accepted, or refused and drawn again",
        "result",
        {"accepted": counts.num_tokens - counts.num_redrawn, "refused": counts.num_redrawn},
    )
    yield counter("onbeat_guide_seconds", "Seconds that grammars took of steps", counts.seconds)
    yield histogram("onbeat_grammar_compile_seconds", "Compiling a new grammar", counts.compile)
    yield counters(
        "onbeat_grammar_refusals",
        "Requests that ended for what their answer had to match",
        "reason",
        counts.refused,
    )
