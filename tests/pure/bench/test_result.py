from __future__ import annotations

import math
import re
from array import array
from pathlib import Path

import orjson
import pytest

from onbeat.bench.bench_config import BenchConfig
from onbeat.bench.bench_load import BenchLoad
from onbeat.bench.record import SentRequest, Status
from onbeat.bench.result import default_file_name
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from onbeat.report.result import write_document
from onbeat.report.run_report import merge_texts
from tests.pure.bench.results import START, document_of, failure, make_records, make_result

# What `vllm bench serve` writes, less what only its own servers and audio models have.
KEYS_OF_VLLM = {
    "date",
    "backend",
    "label",
    "model_id",
    "tokenizer_id",
    "num_prompts",
    "request_rate",
    "burstiness",
    "max_concurrency",
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "request_goodput",
    "output_throughput",
    "total_token_throughput",
    "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(
        f"{statistic}_{metric}_ms"
        for statistic in ("mean", "median", "std", "p99")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}
DETAILS_OF_VLLM = {
    "input_lens",
    "output_lens",
    "ttfts",
    "itls",
    "latencies",
    "start_times",
    "queue_times",
    "generated_texts",
    "errors",
}
OWN_KEYS = {
    "schema",
    "kind",
    "onbeat_version",
    "rejected",
    "attainment",
    "goodput",
    "offered",
    "classes",
    "good",
    "offered_with_slo",
    "slo_mode",
    "arrivals",
    "dataset_name",
    "dataset_path",
    "title",
    "seed",
    "salt",
    "goodput_objectives_ms",
    "interrupted",
    "num_interrupted_requests",
    "timing_origin",
    "prompt_length_source",
    "token_count_source",
    "tokens_per_chunk",
    "num_gpus",
    "output_throughput_per_gpu",
    "errors_by_cause",
    "expired",
    "admitted",
    "attainment_admitted",
    "attainment_by_prompt_decile",
    "attainment_by_tenant",
    "worst_decile",
    "median_rejected_predicted_ttft_ms",
    "median_retry_after_ms",
    "slo_sent",
    "server_verdicts",
    "load",
    "max_dispatch_lag_ms",
    "p99_dispatch_lag_ms",
    *(
        f"{statistic}_{name}_ms"
        for statistic in ("mean", "median", "std", "max", "p50", "p90", "p99")
        for name in ("client_queue_time", "rejection", "expiry")
    ),
    *(
        f"{statistic}_{metric}_ms"
        for statistic in ("max", "p50", "p90")
        for metric in ("ttft", "tpot", "itl", "e2el")
    ),
}


def test_keys_of_a_saved_result() -> None:
    document = document_of(make_result())

    assert set(document) == KEYS_OF_VLLM | OWN_KEYS


def test_details_add_one_entry_a_request() -> None:
    result = make_result([*make_records(3), failure(3)])
    document = document_of(result, detailed=True)

    added = set(document) - KEYS_OF_VLLM - OWN_KEYS
    assert added == DETAILS_OF_VLLM | {
        *("end_times", "statuses", "request_classes", "verdicts", "predicted_ttfts"),
        *("tenants", "job_ids"),
    }
    assert {len(document[key]) for key in added} == {4}
    assert document["ttfts"][3] is None
    assert document["errors"] == ["", "", "", "HTTP 500: boom"]
    assert document["statuses"][3] == "failed"
    assert document["ttfts"][0] == pytest.approx(result.records[0].delivery_times[0] - START)
    assert len(document["itls"][0]) == 9


def test_metadata_stands_beside_the_other_keys() -> None:
    document = document_of(make_result(bench={"metadata": ("commit=abc",), "json": Path("x.json")}))

    assert document["commit"] == "abc"


def test_several_runs_are_saved_as_one_document() -> None:
    runs = [make_result(title="a"), make_result(title="b", interrupted=True)]
    document = document_of(*runs)

    assert [run["title"] for run in document["runs"]] == ["a", "b"]
    assert document["interrupted"] is True


def test_interrupted_requests_count_nowhere() -> None:
    unfinished = SentRequest(
        index=99, num_prompt_tokens=1, max_tokens=1, sent=START, status=Status.INTERRUPTED
    )
    result = make_result([*make_records(2), unfinished], interrupted=True)

    assert result.num_interrupted_requests == 1
    counts = result.summary.counts
    assert (counts.num_completed, counts.num_failed) == (2, 0)


def test_errors_are_grouped_most_frequent_first() -> None:
    records = [*make_records(2), failure(2, status=Status.REJECTED), failure(3), failure(4, detail="later")]
    groups = make_result(records).errors

    assert [(group["status"], group["count"], group["example"]) for group in groups] == [
        ("failed", 2, "boom"),
        ("rejected", 1, "boom"),
    ]


@pytest.mark.parametrize(
    ("lag", "gap", "objective", "what"),
    [
        (0.02, 0.1, 10.0, "the time between two requests"),
        (0.02, 1.0, 0.2, "the tightest objective"),
        (0.02, 1.0, None, "the median TTFT"),
        (0.0074, 1.0, 1.0, None),
        (0.004, 0.01, 0.05, None),
    ],
)
def test_a_client_is_warned_of_where_its_lateness_matters(
    lag: float, gap: float, objective: float | None, what: str | None
) -> None:
    records = make_records(10)
    for record in records:
        shift = record.index * (gap - 0.1)
        record.delivery_times = array("d", [time + shift for time in record.delivery_times])
        record.sent, record.end = record.sent + shift, record.end + shift
        record.scheduled = record.sent - lag
    options = {"goodput": () if objective is None else (f"ttft:{objective * 1e3}",)}
    late = make_result(records, load=BenchLoad(request_rate=1 / gap), title="late", bench=options)

    assert late.values["p99_dispatch_lag_ms"] == pytest.approx(lag * 1e3)
    assert [f" 5 % of {what}" in warning for warning in late.warnings] == ([True] if what else [])
    assert merge_texts([late, make_result(title="fine")]) == [f"{text} (late)" for text in late.warnings]


def test_an_objective_that_nothing_kept_is_named() -> None:
    records = make_records(3)
    for record in records:
        record.slo = SLO(ttft=0.01)
    [warning] = make_result(records).warnings
    assert re.match(r"no first token .* 4\d ms, .* 10 ms", warning)
    records[1].slo = SLO(ttft=1.0)
    assert not make_result(records).warnings, "load may be the reason"


def test_short_answers_are_warned_of() -> None:
    records = make_records(3)
    records[1].num_output_tokens = 4

    assert any("--ignore-eos" in warning for warning in make_result(records).warnings)


@pytest.mark.parametrize(
    ("load", "name"),
    [
        (BenchLoad(max_concurrency=4), "openai-infqps-concurrency4-model-"),
        (BenchLoad(request_rate=2.5), "openai-2.5qps-model-"),
        (BenchLoad(request_rate=math.inf), "openai-infqps-model-"),
    ],
)
def test_file_names(load: BenchLoad, name: str) -> None:
    bench = BenchConfig()

    assert default_file_name(bench, [make_result(load=load)]).startswith(name)


def test_appending_writes_one_document_a_line(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.jsonl"

    write_document(path, {"a": 1}, append=True)
    write_document(path, {"a": 2}, append=True)

    assert [orjson.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2]


def test_an_unwritable_file_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_document(tmp_path, {"a": 1})
