"""What became of requests with objectives, and of groups of prompts, for a terminal and a report."""

from __future__ import annotations

from rich.table import Table

from onbeat.bench.outcomes import VerdictSummary
from onbeat.bench.result import BenchResult
from onbeat.metrics.distribution import Distribution
from onbeat.metrics.jobs import lines_of_jobs
from onbeat.metrics.summary import LatencyStatistic
from onbeat.report.table import named_values, number, percent, rows_table

GROUP_COLUMNS = (
    *("prompts", "offered", "good", "TTFT P50", "TTFT P99"),
    *("TBT P50", "TBT P99", "TBT max"),
)
_GROUP_LATENCIES = (
    *(LatencyStatistic("ttft", "p50"), LatencyStatistic("ttft", "p99")),
    *(LatencyStatistic("itl", name) for name in ("p50", "p99", "max")),
)


def outcome_rows(result: BenchResult) -> list[tuple[str, str]]:
    """Return what became of requests with objectives or without an answer, as (name, value)."""
    summary, times = result.summary, result.response_times
    counts = summary.counts
    if summary.score.num_good is None and not counts.num_rejected + counts.num_expired:
        return []
    rows = [
        ("admitted", f"{counts.num_admitted:,} of {counts.num_offered:,}"),
        ("expired in the queue", number(counts.num_expired)),
    ]
    if counts.num_rejected:  # else it is the share of all, which stands with the counts of the run
        rows.append(("objectives met, of admitted", percent(summary.attainment_admitted)))
    for name, own in (("refused after", times.rejection), ("expired after", times.expiry)):
        if own.median_ms is not None:
            rows.append((f"{name} P50 / P99 / max (ms)", _spread(own)))
    predicted = result.advice.median_predicted_ttft
    if predicted is not None:
        rows.append(("TTFT predicted for the refused, median (ms)", number(predicted * 1e3)))
    return rows if result.verdicts is None else rows + _verdict_rows(result.verdicts)


def _verdict_rows(verdicts: VerdictSummary) -> list[tuple[str, str]]:
    client, server = (
        number(None if seconds is None else seconds * 1e3)
        for seconds in (verdicts.median_client_ttft, verdicts.median_server_ttft)
    )
    rows = [
        ("same verdict by the server", f"{percent(verdicts.agreement)} of {verdicts.num_requests:,}"),
        ("relegated to best effort", number(verdicts.num_relegated)),
        ("TTFT here / in the server, median (ms)", f"{client} / {server}"),
    ]
    if verdicts.agreement != 1:
        rows.insert(1, ("met by the server's verdict", percent(verdicts.met)))
    if verdicts.median_predicted_ttft_error is not None:
        rows.append(("error of the predicted TTFT, median", percent(verdicts.median_predicted_ttft_error)))
    return rows


def group_rows(result: BenchResult) -> list[tuple[str, ...]]:
    """Return one row a group of prompts, as `GROUP_COLUMNS` names it."""
    return [
        (
            name,
            number(own.counts.num_offered),
            percent(own.score.attainment),
            *(number(latency.of(own)) for latency in _GROUP_LATENCIES),
        )
        for name, own in result.groups.items()
    ]


def outcome_tables(result: BenchResult) -> list[Table]:
    """Return the tables of one run; none where there is nothing to say."""
    tables = []
    if rows := outcome_rows(result):
        tables.append(named_values("Objectives", rows))
    if of_groups := group_rows(result):
        tables.append(rows_table("Prompts (times in ms)", GROUP_COLUMNS, of_groups))
    return tables


def outcome_notes(result: BenchResult) -> list[str]:
    """Return the same in sentences, for a page that has no table of them."""
    notes = []
    if rows := outcome_rows(result):
        notes.append("Objectives: " + "; ".join(f"{name} {value}" for name, value in rows) + ".")
    for row in group_rows(result):
        cells = zip(GROUP_COLUMNS[1:], row[1:], strict=True)
        notes.append(f"Requests with {row[0]} prompts: " + ", ".join(f"{c} {v}" for c, v in cells) + ".")
    return [*notes, *lines_of_jobs(result.jobs)]


def _spread(times: Distribution) -> str:
    tail = times.statistics_ms.get("p99")
    return " / ".join(number(value) for value in (times.median_ms, tail, times.max_ms))
