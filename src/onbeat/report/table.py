"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from onbeat.metrics.summary import percentile_name
from onbeat.report.result import SCHEDULED, AnyResult

METRIC_TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "TBT",
    "e2el": "E2E",
    "client_queue_time": "client queue",
}


def number(value: Any, digits: int = 1) -> str:
    """Return a number for people: fewer digits the larger it is; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}f}" if abs(value) >= 10 else f"{value:.{digits + 1}f}"


def summary_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the counts and rates of one run, as (name, value)."""
    rows = [
        ("requests completed", number(summary["completed"])),
        ("requests failed", number(summary["failed"])),
        ("requests rejected", number(summary["rejected"])),
        ("duration (s)", number(summary["duration"])),
        ("prompt tokens", number(summary["total_input_tokens"])),
        ("output tokens", number(summary["total_output_tokens"])),
        ("request throughput (req/s)", number(summary["request_throughput"])),
        ("output throughput (tok/s)", number(summary["output_throughput"])),
        ("total throughput (tok/s)", number(summary["total_token_throughput"])),
        ("peak output in 1 s (tok)", number(summary["max_output_tokens_per_s"])),
        ("peak concurrency", number(summary["max_concurrent_requests"])),
    ]
    if summary["timing_origin"] == SCHEDULED and "p99_dispatch_lag_ms" in summary:
        rows.append(("client lateness P99 (ms)", number(summary["p99_dispatch_lag_ms"])))
    if summary["request_goodput"] is not None:
        rows.append(("goodput (req/s)", number(summary["request_goodput"])))
        rows.append(
            ("objectives met", f"{summary['attainment']:.1%}" if summary["attainment"] is not None else "-")
        )
    return rows


def latency_columns(percentiles: Sequence[float]) -> list[str]:
    """Return the statistics of a latency table; the median is there once, as p50 where that is asked for."""
    median = [] if 50 in percentiles else ["median"]
    return ["mean", *median, "std", *map(percentile_name, percentiles), "max"]


def latency_rows(
    summary: dict[str, Any], metrics: Sequence[str], percentiles: Sequence[float]
) -> list[tuple[str, ...]]:
    """Return one row per metric: its title, then the statistics of `latency_columns` (ms)."""
    columns = latency_columns(percentiles)
    return [
        (METRIC_TITLES[metric], *(number(summary[f"{column}_{metric}_ms"]) for column in columns))
        for metric in metrics
    ]


def machine_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the replicas of a simulated run did, as (name, value); nothing for a measured run."""
    if "num_steps" not in summary:
        return []
    hit_rate, peak, busy = (
        summary[key] for key in ("prefix_cache_hit_rate", "kv_cache_peak_usage", "replica_busy_share")
    )
    rows = [
        ("steps", f"{summary['num_steps']:,}"),
        ("mean step (ms)", "-" if summary["mean_step_ms"] is None else f"{summary['mean_step_ms']:.2f}"),
        ("replicas busy", "-" if busy is None else f"{busy:.0%}"),
        ("MBU while busy", "-" if summary["mbu"] is None else f"{summary['mbu']:.0%}"),
        ("MFU while busy", "-" if summary["mfu"] is None else f"{summary['mfu']:.0%}"),
        ("preemptions", f"{summary['num_preemptions']:,}"),
        ("prefix cache hits", "-" if hit_rate is None else f"{hit_rate:.1%} of prompt tokens"),
        ("KV cache at its fullest", "-" if peak is None else f"{peak:.0%}"),
        ("simulated in (s)", f"{summary['wall_seconds']:.2f}"),
    ]
    if summary["pipeline_bubble_seconds"]:
        rows.insert(3, ("pipeline bubbles (s)", f"{summary['pipeline_bubble_seconds']:,.1f}"))
    return rows


def draft_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what speculation did in a run, as (name, value); nothing where no drafts were verified."""
    if (simulated := summary.get("speculation")) is not None:
        return _simulated_draft_rows(simulated)
    if summary.get("spec_decode_acceptance_rate") is None:
        return []
    rows = [
        ("draft tokens verified", f"{summary['spec_decode_draft_tokens']:,}"),
        ("accepted", f"{summary['spec_decode_acceptance_rate']:.1f}%"),
    ]
    if summary.get("spec_decode_num_drafts"):
        rows += [
            ("verifications", f"{summary['spec_decode_num_drafts']:,}"),
            ("tokens each", f"{summary['spec_decode_acceptance_length']:.2f}"),
        ]
    if by_position := summary.get("spec_decode_per_position_acceptance_rates"):
        rows.append(("accepted by position", " / ".join(f"{rate:.0%}" for rate in by_position)))
    return rows


def _simulated_draft_rows(speculation: dict[str, Any]) -> list[tuple[str, str]]:
    accepted, verifying = speculation["accepted_share"], speculation["verifying_share"]
    return [
        (
            "drafts of a row",
            f"{speculation['draft_length']}, at most {speculation['num_speculative_tokens']}",
        ),
        ("draft tokens verified", f"{speculation['num_drafted_tokens']:,}"),
        ("accepted", "-" if accepted is None else f"{accepted:.1%}"),
        ("decode rows with drafts", "-" if verifying is None else f"{verifying:.1%}"),
        ("tokens of a decode row", f"{speculation['tokens_per_decode']:.2f}"),
    ]


CLASS_COLUMNS = (
    *("class", "TTFT objective", "TBT objective", "offered", "good"),
    *("TTFT P50", "TTFT P99", "TBT P50", "TBT P99"),
)


def class_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return one row a class of objectives, as `CLASS_COLUMNS` names it; none where there is one class."""
    classes = summary.get("classes") or {}
    keys = ("slo_ttft_ms", "slo_tbt_ms", "offered")
    latencies = ("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms")
    return [
        (
            name,
            *(number(each.get(key)) for key in keys),
            "-" if each.get("attainment") is None else f"{each['attainment']:.1%}",
            *(number(each.get(key)) for key in latencies),
        )
        for name, each in classes.items()
        if len(classes) > 1
    ]


def run_tables(
    result: AnyResult, metrics: Sequence[str], percentiles: Sequence[float], *, what: str = "Load test"
) -> list[Table]:
    """Return the tables of one run; `what` names the kind of run."""
    latencies = Table(box=SIMPLE_HEAD, title="Latency (ms)", title_justify="left")
    latencies.add_column("")
    for column in latency_columns(percentiles):
        latencies.add_column(column, justify="right")
    for latency_row in latency_rows(result.summary, metrics, percentiles):
        latencies.add_row(*latency_row)
    tables = [_named_values(what, summary_rows(result.summary)), latencies]
    for title, rows in (
        ("Replicas", machine_rows(result.summary)),
        ("Speculation", draft_rows(result.summary)),
    ):
        if rows:
            tables.append(_named_values(title, rows))
    if of_classes := class_rows(result.summary):
        tables.append(rows_table("Classes (times in ms)", CLASS_COLUMNS, of_classes))
    if errors := result.summary.get("errors_by_cause"):
        tables.append(error_table(errors))
    return tables


def _named_values(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column names what each row is about."""
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def error_table(errors: Sequence[dict[str, Any]]) -> Table:
    """Return failures and rejections by cause."""
    table = Table(box=SIMPLE_HEAD, title="Not completed", title_justify="left")
    for name in ("status", "cause", "count", "example"):
        table.add_column(name, justify="right" if name == "count" else "left", overflow="fold")
    for error in errors:
        table.add_row(error["status"], error["cause"], number(error["count"]), str(error["example"])[:120])
    return table


SWEEP_COLUMNS = (
    ("out tok/s", "output_throughput"),
    ("req/s", "request_throughput"),
    ("TTFT mean", "mean_ttft_ms"),
    ("P90", "p90_ttft_ms"),
    ("P99", "p99_ttft_ms"),
    ("TPOT mean", "mean_tpot_ms"),
    ("P90", "p90_tpot_ms"),
    ("P99", "p99_tpot_ms"),
    ("TBT P99", "p99_itl_ms"),
    ("max", "max_itl_ms"),
    ("accepted %", "spec_decode_acceptance_rate"),
)


def sweep_columns(results: Sequence[AnyResult]) -> list[tuple[str, str]]:
    """Return (title, key) of the columns that any run of a sweep has."""
    return [(title, key) for title, key in SWEEP_COLUMNS if any(key in r.summary for r in results)]


def sweep_table(results: Sequence[AnyResult]) -> Table:
    """Return one row per run of a sweep; a column that no run has is left out."""
    table = Table(box=SIMPLE_HEAD, title="Sweep (times in ms)", title_justify="left", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("done", justify="right")
    columns = sweep_columns(results)
    has_goodput = any(result.summary["request_goodput"] is not None for result in results)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    if has_goodput:
        table.add_column("good", justify="right")
    for result in results:
        summary = result.summary
        lost = summary["failed"] + summary["rejected"]
        done = number(summary["completed"]) + (f" (-{lost})" if lost else "")
        cells = [number(summary.get(key)) for _, key in columns]
        if has_goodput:
            cells.append(f"{summary['attainment']:.0%}")
        table.add_row(result.title, done, *cells)
    return table
