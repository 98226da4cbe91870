"""vLLM's names for what this server can fill truthfully, so that dashboards made for it work."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric

from onbeat.core.protocols import EngineInfo
from onbeat.metrics.counts import AskedCounts, RunCounts
from onbeat.metrics.exporter_speculation import positions
from onbeat.metrics.families import Labels, counter, counters, gauge, gauges, histogram
from onbeat.metrics.speculation_counts import SpeculationCounts

FINISHES = ("stop", "length", "abort", "error")
"""vLLM's words; it knows no refusals."""


def vllm_metrics(counts: RunCounts, model_name: str, *, speculates: bool = False) -> Iterator[Metric]:
    """Yield the aliases, labelled as vLLM labels them.

    Parameters
    ----------
    speculates : whether draft tokens may be planned; vLLM too leaves their metrics out otherwise.
    """
    labels = {"model_name": model_name, "engine": "0"}
    yield from _scalars(counts, labels)
    yield from _histograms(counts, labels)
    if speculates:
        yield from _drafts(counts.speculation, labels)


def vllm_requests(counts: RunCounts, asked: AskedCounts, model_name: str) -> Iterator[Metric]:
    """Yield the aliases of what requests ask for, and of those that a full queue refuses."""
    labels = {"model_name": model_name, "engine": "0"}
    yield histogram("vllm:request_params_n", "As in vLLM", asked.num_choices, labels)
    yield histogram("vllm:request_params_max_tokens", "As in vLLM", asked.max_tokens, labels)
    reasons = ("queue_full", "queue_too_long")
    refused = {(model_name, each): counts.refused[each] for each in reasons}
    name = "vllm:admission_rejections"
    yield counters(name, "As in vLLM; the reasons are ours", ("model_name", "reason"), refused)


def vllm_cache(info: EngineInfo) -> Metric:
    """Return the size of one replica's KV cache, in labels as vLLM has it."""
    size = info.num_blocks * info.block_size
    labels = {
        "engine": "0",
        "block_size": str(info.block_size),
        "num_gpu_blocks": str(info.num_blocks),
        "kv_cache_size_tokens": str(size),
        "kv_cache_max_concurrency": f"{size / info.max_model_len:.2f}",
    }
    return gauge("vllm:cache_config_info", "As in vLLM, of one replica; always 1", 1, labels)


def _scalars(counts: RunCounts, labels: Labels) -> Iterator[Metric]:
    yield gauge("vllm:num_requests_running", "As in vLLM", counts.num_running, labels)
    yield gauge("vllm:num_requests_waiting", "As in vLLM", counts.num_waiting, labels)
    waiting = {(*labels.values(), "capacity"): counts.num_waiting, (*labels.values(), "deferred"): 0}
    name = "vllm:num_requests_waiting_by_reason"
    yield gauges(name, "As in vLLM; here all wait for capacity", (*labels, "reason"), waiting)
    yield gauge("vllm:kv_cache_usage_perc", "As in vLLM: 1 is full", counts.kv_usage, labels)
    yield counter("vllm:prompt_tokens", "As in vLLM", counts.num_prompt_tokens, labels)
    yield counter("vllm:prompt_tokens_cached", "As in vLLM", counts.num_cached_tokens, labels)
    yield counter("vllm:generation_tokens", "As in vLLM", counts.num_output_tokens, labels)
    yield counter("vllm:num_preemptions", "As in vLLM", counts.num_preemptions, labels)
    yield counter("vllm:prefix_cache_queries", "As in vLLM", counts.num_prefix_queries, labels)
    yield counter("vllm:prefix_cache_hits", "As in vLLM", counts.num_prefix_hits, labels)
    finished = {(*labels.values(), reason): counts.finished[reason] for reason in FINISHES}
    yield counters("vllm:request_success", "As in vLLM", (*labels, "finished_reason"), finished)


def _drafts(counts: SpeculationCounts, labels: Labels) -> Iterator[Metric]:
    for name, value in (
        ("num_drafts", counts.num_drafts),
        ("num_draft_tokens", counts.num_drafted_tokens),
        ("num_accepted_tokens", counts.num_accepted_tokens),
    ):
        yield counter(f"vllm:spec_decode_{name}", "As in vLLM", value, labels)
    accepted = {(*labels.values(), position): number for position, number in positions(counts.accepted_at)}
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    yield counters(name, "As in vLLM", (*labels, "position"), accepted)


def _histograms(counts: RunCounts, labels: Labels) -> Iterator[Metric]:
    for name, values in (
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
        ("request_num_preemptions", counts.request_preemptions),
        ("iteration_tokens_total", counts.step_tokens),
    ):
        yield histogram(f"vllm:{name}", "As in vLLM", values, labels)
