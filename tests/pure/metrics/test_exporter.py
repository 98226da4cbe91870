from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from onbeat.core.protocols import StepOutputs
from onbeat.core.request import FinishReason
from onbeat.metrics.counts import RunCounts
from onbeat.metrics.exporter import MetricsExporter
from onbeat.metrics.histogram import Histogram
from onbeat.metrics.tracker import RequestTracker
from tests.pure.metrics.runs import output, request, run_one, stats, step

VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:prompt_tokens_cached_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:num_preemptions_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
}
"""As vLLM's dashboards ask for them."""


def samples(text: str) -> dict[str, float]:
    """Return all samples by name, labels in braces except those of the aliases."""
    result = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            inside = ",".join(f"{k}={v}" for k, v in labels.items())
            result[sample.name + (f"{{{inside}}}" if inside else "")] = sample.value
    return result


def shown_by(exporter: MetricsExporter) -> dict[str, float]:
    return samples(exporter.render().decode())


@pytest.fixture
def counts() -> RunCounts:
    return RunCounts()


def test_a_run_is_counted(counts: RunCounts) -> None:
    tracker = RequestTracker([counts])
    run_one(tracker)
    tracker.open(request("gone", arrival=20.0))
    tracker.close("gone", FinishReason.ABORT, 21.0)
    got = shown_by(MetricsExporter(counts, model_name="m"))
    expected = {
        "onbeat_prompt_tokens_total": 10,
        "onbeat_prompt_tokens_cached_total": 4,
        "onbeat_output_tokens_total": 4,
        "onbeat_steps_total": 3,
        "onbeat_preemptions_total": 1,
        "onbeat_requests_total{finish_reason=length}": 1,
        "onbeat_requests_total{finish_reason=abort}": 1,
        "onbeat_requests_total{finish_reason=stop}": 0,
        "onbeat_kv_blocks": 100,
        "onbeat_time_to_first_token_seconds_count": 1,
        "onbeat_time_to_first_token_seconds_sum": 2.0,
        "onbeat_request_queue_seconds_sum": 1.0,
        "onbeat_time_between_tokens_seconds_count": 2,
        "onbeat_time_between_tokens_seconds_sum": 1.5,
        "onbeat_time_between_tokens_seconds_bucket{le=0.5}": 1,
        "onbeat_time_per_output_token_seconds_sum": 0.5,
        "onbeat_request_e2e_seconds_count": 1,
        "onbeat_request_e2e_seconds_sum": 3.5,
        "onbeat_step_chunk_tokens_sum": 6,
        "onbeat_step_decodes_sum": 2,
        "onbeat_step_rows_count": 3,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_gauges_follow_requests_between_steps(counts: RunCounts) -> None:
    tracker = RequestTracker([counts])

    def gauges() -> tuple[float, ...]:
        got = shown_by(MetricsExporter(counts, model_name="m"))
        return tuple(
            got[f"onbeat_{name}"] for name in ("requests_running", "requests_waiting", "kv_blocks_used")
        )

    tracker.open(request("a", arrival=1.0))
    tracker.open(request("b", arrival=1.0))
    assert gauges() == (0, 2, 0)
    step(tracker, StepOutputs(2.0, [output("a")], stats(1.0, 2.0, num_running=1, num_waiting=1)))
    assert gauges() == (1, 1, 2)
    tracker.close("b", FinishReason.ABORT, 2.5)
    assert gauges() == (1, 0, 2)
    tracker.close("a", FinishReason.ABORT, 3.0)  # no step follows that could say so
    assert gauges() == (0, 0, 0)
    tracker.open(request("c", arrival=4.0))
    last = output("c", finish_reason=FinishReason.LENGTH)
    tracker.on_step(StepOutputs(5.0, [last], stats(4.0, 5.0, num_running=0, num_used_blocks=0)))
    assert gauges() == (0, 0, 0), "its reader is slow; the engine has done with it"


def test_kv_is_kept_for_open_jobs_only(counts: RunCounts) -> None:
    tracker = RequestTracker([counts])
    step(tracker, StepOutputs(2.0, [], stats(1.0, 2.0, num_kept_blocks=30)))

    def kept() -> float:
        return shown_by(MetricsExporter(counts, model_name="m"))["onbeat_kv_blocks_kept"]

    assert kept() == 0, "the job has ended since"
    counts.jobs.num_open = 1
    assert kept() == 30


def test_predictions_and_utilisation_are_absent_where_nobody_predicts(counts: RunCounts) -> None:
    run_one(RequestTracker([counts]))
    got = shown_by(MetricsExporter(counts, model_name="m"))
    assert got["onbeat_step_predicted_seconds_count"] == got["onbeat_step_mbu_count"] == 0
    gauges = {f"onbeat_step_{name}_ratio" for name in ("mbu", "mfu", "prediction_bias")}
    assert not gauges & got.keys()


@pytest.mark.parametrize(("is_drifting", "shown"), [(None, None), (False, 0.0), (True, 1.0)])
def test_the_drift_alarm_is_a_gauge(counts: RunCounts, is_drifting, shown) -> None:
    counts.on_step(stats(10.0, 10.5, predicted_seconds=0.4, is_drifting=is_drifting))
    got = shown_by(MetricsExporter(counts, model_name="m"))
    assert got.get("onbeat_step_prediction_drift") == shown


def test_predictions_are_compared_with_the_clock(counts: RunCounts) -> None:
    for _ in range(3):
        counts.on_step(stats(10.0, 10.5, predicted_seconds=0.4, mbu=0.25, mfu=0.05))
    counts.on_step(stats(11.0, 11.0, predicted_seconds=0.4))  # a clock that stood still says nothing
    got = shown_by(MetricsExporter(counts, model_name="m"))
    expected = {
        "onbeat_step_predicted_seconds_count": 3,
        "onbeat_step_predicted_seconds_sum": 1.2,
        "onbeat_step_prediction_error_ratio_sum": 0.6,
        "onbeat_step_prediction_error_ratio_bucket{le=0.15}": 0,
        "onbeat_step_prediction_bias_ratio": 1.25,
        "onbeat_step_mbu_ratio": 0.25,
        "onbeat_step_mfu_sum": 0.15,
        "onbeat_step_mbu_bucket{le=0.3}": 3,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_the_bias_forgets_old_steps(counts: RunCounts) -> None:
    for actual in [1.0] * 200 + [2.0] * 400:
        counts.on_step(stats(10.0, 10.0 + actual, predicted_seconds=1.0))
    assert counts.prediction_bias == pytest.approx(2.0, rel=0.01)


def test_what_the_server_does_is_counted(counts: RunCounts) -> None:
    exporter = MetricsExporter(counts, model_name="m")
    exporter.server.http.update(
        [("/v1/completions", "200"), ("/v1/completions", "200"), ("unmatched", "404")]
    )
    exporter.server.stream_errors["engine_dead"] += 1
    for lag in (0.001, 0.3):
        exporter.server.loop_lag.observe(lag)
    got = shown_by(exporter)
    assert got["onbeat_event_loop_lag_seconds_bucket{le=0.2}"] == 1
    assert got["onbeat_event_loop_lag_seconds_sum"] == pytest.approx(0.301)
    assert got["onbeat_http_requests_total{endpoint=/v1/completions,status=200}"] == 2
    assert got["onbeat_http_requests_total{endpoint=unmatched,status=404}"] == 1
    assert got["onbeat_stream_errors_total{code=engine_dead}"] == 1


def test_vllm_names_appear_only_when_asked_for(counts: RunCounts) -> None:
    tracker = RequestTracker([counts])
    run_one(tracker)
    tracker.open(request("open", arrival=20.0))
    plain = shown_by(MetricsExporter(counts, model_name="m"))
    assert not [name for name in plain if name.startswith("vllm:")]
    exporter = MetricsExporter(counts, model_name="m", aliases="vllm")
    aliased = shown_by(exporter)
    families = {name.split("{")[0] for name in aliased if name.startswith("vllm:")}
    for suffix in ("_bucket", "_sum", "_count"):
        families = {name.removesuffix(suffix) for name in families}
    assert families == VLLM_NAMES
    assert aliased["vllm:generation_tokens_total"] == 4
    assert aliased["vllm:kv_cache_usage_perc"] == pytest.approx(0.02)
    assert aliased["vllm:request_success_total{finished_reason=length}"] == 1


@given(st.lists(st.floats(0, 100)), st.lists(st.floats(0.001, 50), min_size=1, unique=True).map(sorted))
def test_histograms_count_like_prometheus(values: list[float], bounds: list[float]) -> None:
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value)
    *inner, last = histogram.cumulative()
    assert [number for _, number in inner] == [sum(v <= bound for v in values) for bound in bounds]
    assert (last[0], int(last[1])) == ("+Inf", len(values))
    assert histogram.count == len(values)
    assert histogram.sum == pytest.approx(sum(values))


def test_grammars_are_counted(counts: RunCounts) -> None:
    work = {"num_guided_tokens": 8, "num_redrawn_tokens": 2, "guide_seconds": 0.003}
    counts.on_step(stats(0.1, 0.2, **work, compile_seconds=[0.004, 0.2], num_guide_faults=1))
    counts.on_step(stats(0.2, 0.3))
    for code in (
        "grammar_too_complex",
        "grammar_too_complex",
        "unsupported_schema",
        "invalid_value",
        "other",
    ):
        counts.grammars.refuse(code)
    got = shown_by(MetricsExporter(counts, model_name="m"))
    expected = {
        "onbeat_guided_tokens_total{result=accepted}": 6,
        "onbeat_guided_tokens_total{result=refused}": 2,
        "onbeat_guide_seconds_total": 0.003,
        "onbeat_grammar_compile_seconds_count": 2,
        "onbeat_grammar_compile_seconds_sum": 0.204,
        "onbeat_grammar_compile_seconds_bucket{le=0.005}": 1,
        "onbeat_grammar_refusals_total{reason=too_complex}": 2,
        "onbeat_grammar_refusals_total{reason=unsupported}": 1,
        "onbeat_grammar_refusals_total{reason=invalid}": 2,
        "onbeat_grammar_refusals_total{reason=in_answer}": 1,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)
