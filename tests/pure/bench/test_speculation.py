"""What a result says of the server's speculation."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from onbeat.bench.record import SentRequest
from onbeat.bench.result import BenchRun
from onbeat.bench.speculation import Drafts, drafts_of, measured_drafts
from onbeat.core.step_stats import DraftStats
from onbeat.report.result import Facts, show, write_page
from tests.pure.bench.results import make_records, make_result, result_of
from tests.pure.metrics.fake_server import FakeServer

VLLM = """
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 36.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 24.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 4.0
"""


def drafts(number: int, drafted: int, *accepted: int) -> Drafts:
    by_position = {str(place): count for place, count in enumerate(accepted)}
    return Drafts({"drafts": number, "draft_tokens": drafted, "accepted_tokens": sum(accepted)} | by_position)


ALL, EARLIER, NEW = drafts(12, 36, 12, 8, 4), drafts(2, 6, 2, 2), drafts(10, 30, 10, 6, 4)
STEP = DraftStats(
    lengths=[0, 0, 0, 2], drafted_at=[2, 2, 2], accepted_at=[2, 1, 0], num_tokens=5, expected_tokens=5
)


def with_usage(records: list[SentRequest]) -> list[SentRequest]:
    for record in records:
        record.num_drafted_tokens, record.num_accepted_tokens = 8, 6
    return records


def shown(*runs: BenchRun) -> str:
    file = StringIO()
    show(result_of(*runs), Console(width=160, file=file))
    return file.getvalue()


def test_vllms_counters_are_read_over_all_engines() -> None:
    assert drafts_of(VLLM.encode()) == ALL


def test_onbeats_own_counters_are_read_without_aliases() -> None:
    server = FakeServer(proposer="ngram")
    for _ in range(3):
        server.step(0.0, 0.1, drafts=STEP)
    assert drafts_of(server.exporter.render()) == drafts(6, 18, 6, 3, 0)


def test_a_server_without_speculation_counts_nothing() -> None:
    assert not drafts_of(FakeServer().exporter.render())


def keys_of(counts: Drafts, records: list[SentRequest]) -> dict[str, Any]:
    return Facts("", measured_drafts(counts, records)).values


def test_keys_are_vllms() -> None:
    assert keys_of(NEW, with_usage(make_records(3))) == {
        "spec_decode_acceptance_rate": pytest.approx(100 * 20 / 30),
        "spec_decode_acceptance_length": 3.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 30,
        "spec_decode_accepted_tokens": 20,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.6, 0.4],
        "spec_decode_source": "metrics",
    }


def test_usage_says_what_it_can_where_there_are_no_metrics() -> None:
    assert keys_of(Drafts(), with_usage(make_records(3))) == {
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_draft_tokens": 24,
        "spec_decode_accepted_tokens": 18,
        "spec_decode_source": "usage",
    }


@pytest.mark.parametrize("counts", [Drafts(), drafts(0, 0, 0), drafts(-10, -30, -10)])
def test_a_run_without_drafts_has_nothing_of_them(counts: Drafts) -> None:
    """Nor has one in which the server was started anew."""
    assert measured_drafts(counts, make_records(3)) == []


def test_terminal_and_page_show_it_where_it_is(tmp_path: Path) -> None:
    facts = Facts("Speculation", measured_drafts(NEW, []))
    result = replace(make_result(with_usage(make_records(3))), parts=[facts])
    text = shown(result)
    for part in ("Speculation", "66.7%", "3.00", "100% / 60% / 40%"):
        assert part in text
    write_page(result_of(result), tmp_path / "report.html")
    assert "<th>Speculation</th>" in (tmp_path / "report.html").read_text()
    plain = make_result()
    assert "Speculation" not in shown(plain)
    assert "accepted %" in shown(result, plain)
    assert "accepted %" not in shown(plain, plain)
