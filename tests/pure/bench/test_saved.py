"""The file of a result: its keys, which users' scripts read, and what is said of a file that is none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from onbeat.bench.bench_load import BenchLoad
from onbeat.bench.compare import read_runs
from onbeat.bench.record import SentRequest, ServerVerdict, Status
from onbeat.bench.result import BenchRun
from onbeat.core.errors import ConfigError
from onbeat.core.slo import SLO
from tests.pure.bench.results import document_of, failure, make_records, make_result

SAVED = Path(__file__).parents[2] / "data" / "bench_result.json"


def answers() -> list[SentRequest]:
    """Answers of two classes, with verdicts of the server for every fifth."""
    records = make_records(40)
    for place, record in enumerate(records):
        record.slo = SLO(ttft=0.048, tbt=0.05) if place % 3 else SLO(ttft=10.0, e2e=30.0)
        record.request_class = "hard" if place % 3 else "easy"
        record.tenant = "abc"[place % 3]
        record.offered_prompt_tokens = 10 * place + 10
        record.num_drafted_tokens, record.num_accepted_tokens = 8, 6
        if place % 5 == 0:
            record.verdict = ServerVerdict(
                is_met=place % 10 == 0, ttft=0.04, predicted_ttft=0.05, is_relegated=place == 20
            )
    return records


def refusals() -> list[SentRequest]:
    records = []
    for index in range(40, 46):
        status = (Status.REJECTED, Status.EXPIRED, Status.FAILED)[index % 3]
        record = failure(index, status=status)
        record.slo, record.request_class = SLO(ttft=10.0, tbt=1.0), "easy"
        if status is Status.REJECTED:
            record.predicted_ttft, record.retry_after = 3.0 + index, 1.5
        records.append(record)
    return records


def result_with_classes() -> BenchRun:
    bench = {"goodput": (), "metadata": ("commit=abc",), "json": Path("x.json"), "num_gpus": 2}
    return make_result(
        [*answers(), *refusals()], load=BenchLoad(request_rate=2.5, burstiness=0.5, salt="s"), bench=bench
    )


def values_in(document: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what a document holds, in its order, each with its place."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from values_in(value, f"{where}.{key}")
    elif isinstance(document, list):
        for place, value in enumerate(document):
            yield from values_in(value, f"{where}[{place}]")
    else:
        yield where, document


def test_the_keys_and_values_of_a_saved_result_stay() -> None:
    document = document_of(result_with_classes()) | {"date": "D", "slo_sent": "body", "onbeat_version": "V"}
    expected, found = list(values_in(json.loads(SAVED.read_text()))), list(values_in(document))
    assert [place for place, _ in found] == [place for place, _ in expected]
    for (place, value), (_, before) in zip(found, expected, strict=True):
        assert value == (pytest.approx(before, rel=1e-9) if isinstance(before, float) else before), place


def saved(path: Path, **keys: Any) -> Path:
    document = document_of(make_result(make_records(3)), detailed=True) | keys
    path.write_text(json.dumps(document))
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mean_ttft_ms", "fast", "mean_ttft_ms is 'fast'"),
        ("output_throughput", True, "output_throughput is True"),
        ("ttfts", 3, "ttfts is 3;"),
        ("itls", [0.1, 0.2, 0.3], r"itls\[0\] is 0.1;"),
        ("output_lens", [10, None, 10], r"output_lens\[1\] is None"),
        ("latencies", [0.1], "ttfts 3, itls 3, latencies 1, output_lens 3"),
    ],
)
def test_a_key_that_holds_what_it_cannot_is_named(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    path = saved(tmp_path / "x.json", **{key: value})
    with pytest.raises(ConfigError, match=message) as caught:
        read_runs(path)
    assert str(path) in str(caught.value)


def test_a_result_of_another_tool_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """One that saves requests without their E2E still has its numbers."""
    path = saved(tmp_path / "x.json")
    document = json.loads(path.read_text())
    for key in ("latencies", "attainment_admitted", "title", "num_gpus"):
        del document[key]
    path.write_text(json.dumps(document))
    (run,) = read_runs(path)
    assert run.requests is None
    assert run.throughputs["output_throughput"] == document["output_throughput"]
    assert "num_gpus" not in run.settings


def test_older_versions_are_read_and_newer_ones_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.json")
    (now,) = read_runs(path)
    document = json.loads(path.read_text())
    old = {key: value for key, value in document.items() if key not in {"schema", "kind", "onbeat_version"}}
    path.write_text(json.dumps({**old, "schema_version": 1}))
    assert read_runs(path) == [now]
    for version in (3, "2", None):
        path.write_text(json.dumps({**document, "schema": version, "onbeat_version": "9.9"}))
        with pytest.raises(ConfigError, match=r"2.*\(9\.9\)"):
            read_runs(path)
