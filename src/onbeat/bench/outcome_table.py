"""What became of requests with objectives, and of groups of prompts, for a terminal and a report."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from onbeat.report.table import number, rows_table

GROUP_COLUMNS = (
    *("prompts", "offered", "good", "TTFT P50", "TTFT P99"),
    *("TBT P50", "TBT P99", "TBT max"),
)
_GROUP_LATENCIES = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "max_itl_ms")


def outcome_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what became of requests with objectives or without an answer, as (name, value)."""
    refused = summary["rejected"] + summary["expired"]
    if summary.get("good") is None and not refused:
        return []
    rows = [
        ("admitted", f"{summary['admitted']:,} of {summary['offered']:,}"),
        ("expired in the queue", number(summary["expired"])),
        ("objectives met, of all", _percent(summary.get("attainment"))),
        ("objectives met, of admitted", _percent(summary["attainment_admitted"])),
    ]
    for name, key in (("refused after", "rejection"), ("expired after", "expiry")):
        if summary[f"median_{key}_ms"] is not None:
            rows.append((f"{name} P50 / P99 / max (ms)", _spread(summary, key)))
    if summary["median_rejected_predicted_ttft_ms"] is not None:
        predicted = number(summary["median_rejected_predicted_ttft_ms"])
        rows.append(("TTFT predicted for the refused, median (ms)", predicted))
    return rows + _verdict_rows(summary["server_verdicts"])


def _verdict_rows(verdicts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if verdicts is None:
        return []
    client, server = (number(verdicts[f"median_{who}_ttft_ms"]) for who in ("client", "server"))
    return [
        ("the server's own verdict: met", _percent(verdicts["met"])),
        ("same verdict as here", f"{_percent(verdicts['agreement'])} of {verdicts['requests']:,}"),
        ("relegated to best effort", number(verdicts["relegated"])),
        ("TTFT here / in the server, median (ms)", f"{client} / {server}"),
        ("error of the predicted TTFT, median", _percent(verdicts["median_predicted_ttft_error"])),
    ]


def group_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row a group of prompts, as `GROUP_COLUMNS` names it."""
    return [
        (
            name,
            number(own["offered"]),
            _percent(own.get("attainment")),
            *(number(own.get(key)) for key in _GROUP_LATENCIES),
        )
        for name, own in summary["groups"].items()
    ]


def outcome_tables(summary: dict[str, Any]) -> list[Table]:
    """Return the tables of one run; none where there is nothing to say."""
    tables = []
    if rows := outcome_rows(summary):
        outcomes = Table(box=SIMPLE_HEAD, title="Objectives", title_justify="left", show_header=False)
        outcomes.add_column()
        outcomes.add_column(justify="right")
        for row in rows:
            outcomes.add_row(*row)
        tables.append(outcomes)
    if of_groups := group_rows(summary):
        tables.append(rows_table("Prompts (times in ms)", GROUP_COLUMNS, of_groups))
    return tables


def outcome_notes(summary: dict[str, Any]) -> list[str]:
    """Return the same in sentences, for a page that has no table of them."""
    notes = []
    if rows := outcome_rows(summary):
        notes.append("Objectives: " + "; ".join(f"{name} {value}" for name, value in rows) + ".")
    for row in group_rows(summary):
        cells = zip(GROUP_COLUMNS[1:], row[1:], strict=True)
        notes.append(f"Requests with {row[0]} prompts: " + ", ".join(f"{c} {v}" for c, v in cells) + ".")
    return notes


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _spread(summary: dict[str, Any], key: str) -> str:
    tail = summary.get(f"p99_{key}_ms")
    return " / ".join(
        number(value) for value in (summary[f"median_{key}_ms"], tail, summary[f"max_{key}_ms"])
    )
