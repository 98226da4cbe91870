"""Refusals, verdicts of the server, groups of prompts."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from onbeat.bench.client import refusal
from onbeat.bench.record import SentRequest, ServerVerdict, Status
from onbeat.bench.result import BenchRun
from onbeat.core.slo import SLO
from onbeat.report.result import show, write_page
from tests.pure.bench.results import failure, make_records, make_result, result_of

EASY, HARD = SLO(ttft=10.0, tbt=1.0), SLO(ttft=0.001)


def answered(count: int, *, hard: int = 0, **options: Any) -> list[SentRequest]:
    records = make_records(count, **options)
    for position, record in enumerate(records):
        record.slo = HARD if position < hard else EASY
        record.request_class = "hard" if position < hard else "easy"
    return records


def refused(index: int, seconds: float, status: Status, **fields: Any) -> SentRequest:
    record = failure(index, status=status)
    record.end = record.sent + seconds
    record.slo, record.request_class = EASY, "easy"
    for name, value in fields.items():
        setattr(record, name, value)
    return record


def shown(result: BenchRun) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    show(result_of(result), console)
    return console.export_text()


def test_refused_expired_and_failed_requests_are_counted_apart() -> None:
    records = [
        *answered(6, hard=2),
        refused(6, 0.01, Status.REJECTED, predicted_ttft=3.0, retry_after=1.0),
        refused(7, 0.03, Status.REJECTED, predicted_ttft=5.0),
        refused(8, 0.5, Status.EXPIRED),
        failure(9),
    ]
    summary = make_result(records).values

    counts = [summary[key] for key in ("offered", "completed", "rejected", "expired", "failed", "admitted")]
    assert counts == [10, 6, 2, 1, 1, 8]
    assert summary["attainment"] == pytest.approx(4 / 9)  # the failure had no objectives
    assert summary["attainment_admitted"] == pytest.approx(4 / 8)
    assert summary["median_rejection_ms"] == pytest.approx(20)
    assert summary["max_rejection_ms"] == pytest.approx(30)
    assert summary["max_expiry_ms"] == pytest.approx(500)
    assert summary["median_rejected_predicted_ttft_ms"] == pytest.approx(4000)
    assert summary["median_retry_after_ms"] == pytest.approx(1000)


def test_each_class_has_its_own_counts() -> None:
    records = [*answered(4, hard=1), refused(4, 0.01, Status.REJECTED)]
    classes = make_result(records).values["classes"]

    assert (classes["easy"]["rejected"], classes["easy"]["attainment_admitted"]) == (1, 1.0)
    assert classes["easy"]["attainment"] == pytest.approx(3 / 4)
    assert (classes["hard"]["admitted"], classes["hard"]["attainment_admitted"]) == (1, 0.0)


def test_the_verdict_of_the_server_is_held_against_our_own() -> None:
    records = answered(5, hard=1)
    for position, record in enumerate(records[:4]):
        record.verdict = ServerVerdict(
            is_met=position != 3,
            ttft=record.delivery_times[0] - record.arrival - 0.002,
            predicted_ttft=0.05,
            is_relegated=position == 3,
        )
    verdicts = make_result(records).values["server_verdicts"]

    assert (verdicts["requests"], verdicts["agreement"], verdicts["met"]) == (4, 0.5, 0.75)
    assert (verdicts["only_client_good"], verdicts["only_server_met"], verdicts["relegated"]) == (1, 1, 1)
    assert verdicts["median_ttft_difference_ms"] == pytest.approx(2)
    assert 0 <= verdicts["median_predicted_ttft_error"] < 0.3


def test_without_verdicts_nothing_is_said_of_them() -> None:
    assert make_result(answered(3)).values["server_verdicts"] is None


def test_a_verdict_with_odd_fields_is_read_as_far_as_it_goes() -> None:
    verdict = ServerVerdict.parse({"met": "yes", "ttft_ms": 12, "tbt_p99_ms": None, "token_attainment": True})

    assert verdict == ServerVerdict(ttft=0.012)


def test_terminal_and_page_show_what_became_of_requests(tmp_path: Path) -> None:
    records = [*answered(4), refused(4, 0.004, Status.REJECTED, predicted_ttft=2.0)]
    records[0].verdict = ServerVerdict(is_met=True, ttft=0.05)
    result = make_result(records)

    path = tmp_path / "page.html"
    write_page(result_of(result), path)
    text, page = shown(result), path.read_text()
    for wanted in ("4 of 5", "100.0%", "4.00 / 4.00 / 4.00", "100.0% of 1"):
        assert wanted in text
        assert wanted in page


def test_what_was_said_is_not_said_again() -> None:
    records = answered(4)
    for record in records:
        record.verdict = ServerVerdict(is_met=True, ttft=0.05)
    text = shown(make_result(records))

    assert "100.0% of 4" in text
    for once in ("of admitted", "met by the server", "error of the predicted"):
        assert once not in text
    records[0].verdict = ServerVerdict(is_met=False, ttft=0.05, predicted_ttft=0.06)
    text = shown(make_result(records))
    assert re.search(r"server's verdict +75\.0%", text)
    assert "predicted" in text


def test_refused_requests_are_as_long_as_those_that_the_server_counted() -> None:
    """A server counts its chat template too, of the prompts that it answers: no reason to part them."""
    records = [*answered(10), *(refused(index, 0.01, Status.REJECTED) for index in range(10, 20))]
    for record in records[:10]:
        record.num_prompt_tokens += 11
    summary = make_result(records).values

    (only,) = summary["attainment_by_prompt_decile"]
    assert (only["max_prompt_tokens"], only["offered"], only["attainment"]) == (12, 20, 0.5)
    assert summary["worst_decile"] is None


def test_a_run_without_objectives_has_no_such_table() -> None:
    result = make_result(make_records(3), bench={})

    assert "Objectives" not in shown(result)


@pytest.mark.parametrize(
    ("status", "expected"),
    [(429, Status.REJECTED), (503, Status.REJECTED), (504, Status.EXPIRED), (500, Status.FAILED)],
)
def test_the_status_says_what_kind_of_refusal_it_is(status: int, expected: Status) -> None:
    record = SentRequest(index=0, num_prompt_tokens=1, max_tokens=1)

    error = refusal(record, status, {"retry-after": "2"}, {"error": {"message": "no", "code": "c"}})

    assert record.status is expected
    assert (error.cause, error.detail, error.code) == (f"HTTP {status}", "no", "c")
    assert record.retry_after == (None if status == 500 else 2.0)


def test_a_dead_engine_refuses_nobody_it_has_failed() -> None:
    record = SentRequest(index=0, num_prompt_tokens=1, max_tokens=1)

    refusal(record, 503, {}, {"error": {"message": "gone", "code": "engine_dead"}})

    assert record.status is Status.FAILED


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({}, None),
    ],
)
def test_when_to_come_again(headers: dict[str, str], seconds: float | None) -> None:
    record = SentRequest(index=0, num_prompt_tokens=1, max_tokens=1)

    refusal(record, 429, headers, None)

    assert record.retry_after == seconds
