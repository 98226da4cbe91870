"""Results as tables for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import OverflowMethod, RenderableType
from rich.table import Table
from rich.text import Text

from onbeat.metrics.distribution import percentile_name
from onbeat.metrics.summary import LatencyStatistic, RunSummary
from onbeat.report.result import CLIENT_QUEUE, SCHEDULED, AnyResult, ErrorGroup, MachineSummary

METRIC_TITLES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "TBT",
    "e2el": "E2E",
    CLIENT_QUEUE: "client queue",
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


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent; `-` for None."""
    return "-" if share is None else f"{share:.{digits}%}"


def summary_rows(result: AnyResult) -> list[tuple[str, str]]:
    """Return the counts and rates of one run, as (name, value)."""
    counts, score = result.summary.counts, result.summary.score
    rows = [
        ("requests completed", number(counts.num_completed)),
        ("requests failed", number(counts.num_failed)),
        ("requests rejected", number(counts.num_rejected)),
        ("duration (s)", number(counts.duration)),
        ("prompt tokens", number(counts.num_prompt_tokens)),
        ("output tokens", number(counts.num_output_tokens)),
        ("request throughput (req/s)", number(counts.request_throughput)),
        ("output throughput (tok/s)", number(counts.output_throughput)),
        ("total throughput (tok/s)", number(counts.total_token_throughput)),
        ("peak output in 1 s (tok)", number(result.summary.max_output_tokens_per_s)),
        ("peak concurrency", number(result.summary.max_concurrent_requests)),
    ]
    if result.timing_origin == SCHEDULED and result.client is not None:
        rows.append(("client lateness P99 (ms)", number(result.client.p99_dispatch_lag_ms)))
    if score.request_goodput is not None:
        rows.append(("goodput (in time, req/s)", number(score.request_goodput)))
        rows.append(("objectives met", percent(score.attainment)))
    return rows


def latency_columns(percentiles: Sequence[float]) -> list[str]:
    """Return the statistics of a latency table; the median is there once, as p50 where that is asked for."""
    median = [] if 50 in percentiles else ["median"]
    return ["mean", *median, "std", *map(percentile_name, percentiles), "max"]


def latency_rows(
    result: AnyResult, metrics: Sequence[str], percentiles: Sequence[float]
) -> list[tuple[str, ...]]:
    """Return one row per metric: its title, then the statistics of `latency_columns` (ms)."""
    columns = latency_columns(percentiles)
    rows = []
    for metric in metrics:
        statistics = result.latencies[metric].statistics_ms
        rows.append((METRIC_TITLES[metric], *(number(statistics.get(column)) for column in columns)))
    return rows


def machine_rows(machine: MachineSummary | None) -> list[tuple[str, str]]:
    """Return what the replicas of a simulated run did, as (name, value); nothing for a measured run."""
    if machine is None:
        return []
    mean_step = "-" if machine.mean_step is None else f"{machine.mean_step * 1e3:.2f}"
    hit_rate = machine.prefix_cache_hit_rate
    rows = [
        ("steps", f"{machine.num_steps:,}"),
        ("mean step (ms)", mean_step),
        ("replicas busy", percent(machine.replica_busy_share, digits=0)),
        ("memory bandwidth used while busy (MBU)", percent(machine.mbu, digits=0)),
        ("arithmetic used while busy (MFU)", percent(machine.mfu, digits=0)),
        ("preemptions", f"{machine.num_preemptions:,}"),
        ("prefix cache hits", "-" if hit_rate is None else f"{hit_rate:.1%} of prompt tokens"),
        ("KV cache at its fullest", percent(machine.kv_cache_peak_usage, digits=0)),
        ("simulated in (s)", f"{machine.wall_seconds:.2f}"),
    ]
    if machine.pipeline_bubble_seconds:
        rows.insert(3, ("pipeline bubbles (s)", f"{machine.pipeline_bubble_seconds:,.1f}"))
    return rows


def draft_rows(result: AnyResult) -> list[tuple[str, str]]:
    """Return what speculation did in a run, as (name, value); nothing where no drafts were verified."""
    return [] if result.drafts is None else result.drafts.rows()


CLASS_COLUMNS = (
    *("class", "TTFT objective", "TBT objective", "offered", "good"),
    *("TTFT P50", "TTFT P99", "TBT P50", "TBT P99"),
)


_CLASS_LATENCIES = tuple(
    LatencyStatistic(metric, statistic) for metric in ("ttft", "itl") for statistic in ("p50", "p99")
)


def class_rows(summary: RunSummary) -> list[tuple[str, ...]]:
    """Return one row a class of objectives, as `CLASS_COLUMNS` names it; none where there is one class."""
    rows = []
    for name, own in summary.classes.items():
        ttft, tbt = (None, None) if own.objectives is None else (own.objectives.ttft, own.objectives.tbt)
        rows.append(
            (
                name,
                *(number(None if limit is None else limit * 1e3) for limit in (ttft, tbt)),
                number(own.counts.num_offered),
                percent(own.score.attainment),
                *(number(latency.of(own)) for latency in _CLASS_LATENCIES),
            )
        )
    return rows if len(rows) > 1 else []


def run_tables(
    result: AnyResult, metrics: Sequence[str], percentiles: Sequence[float], *, what: str = "Load test"
) -> list[Table]:
    """Return the tables of one run; `what` names the kind of run."""
    columns = ("", *latency_columns(percentiles))
    latencies = latency_rows(result, metrics, percentiles)
    tables = [
        named_values(what, summary_rows(result)),
        filled_table("Latency (ms)", columns, latencies, box=SIMPLE_HEAD),
    ]
    for title, rows in (("Replicas", machine_rows(result.machine)), ("Speculation", draft_rows(result))):
        if rows:
            tables.append(named_values(title, rows))
    if of_classes := class_rows(result.summary):
        tables.append(rows_table("Classes (times in ms)", CLASS_COLUMNS, of_classes))
    if result.errors:
        tables.append(error_table(result.errors))
    return tables


def named_values(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Return a table of (name, value) without a header."""
    return filled_table(title, ("", ""), rows, box=SIMPLE_HEAD, show_header=False)


def rows_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table whose first column names what each row is about."""
    plain = [[Text(cell) for cell in row] for row in rows]  # names of tenants are not markup
    return filled_table(title, columns, plain, box=SIMPLE_HEAD)


def filled_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Iterable[RenderableType]],
    *,
    texts: Collection[int] = (0,),
    overflow: OverflowMethod = "ellipsis",
    **look: Any,
) -> Table:
    """Return a table of rows.

    Parameters
    ----------
    texts : columns that hold text, which starts at the left; numbers end at the right.
    overflow : what becomes of a cell that is wider than its column.
    look : further arguments of `rich.table.Table`.
    """
    table = Table(title=title, title_justify="left", **look)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place in texts else "right", overflow=overflow)
    for row in rows:
        table.add_row(*row)
    return table


def error_table(errors: Sequence[ErrorGroup]) -> Table:
    """Return failures and rejections by cause."""
    rows = [
        map(Text, (error.status, error.cause, number(error.count), str(error.example)[:120]))
        for error in errors  # what a server says is not markup
    ]
    columns = ("status", "cause", "count", "example")
    return filled_table("Not completed", columns, rows, texts=(0, 1, 3), overflow="fold", box=SIMPLE_HEAD)


_SWEEP_LATENCIES = (
    ("TTFT mean", LatencyStatistic("ttft", "mean")),
    ("P90", LatencyStatistic("ttft", "p90")),
    ("P99", LatencyStatistic("ttft", "p99")),
    ("TPOT mean", LatencyStatistic("tpot", "mean")),
    ("P90", LatencyStatistic("tpot", "p90")),
    ("P99", LatencyStatistic("tpot", "p99")),
    ("TBT P99", LatencyStatistic("itl", "p99")),
    ("max", LatencyStatistic("itl", "max")),
)


def sweep_columns(results: Sequence[AnyResult]) -> list[tuple[str, list[float | None]]]:
    """Return the numbers of a sweep by column: its title, and the value of each run.

    A column of which no run knows anything is left out.
    """
    counts = [result.summary.counts for result in results]
    columns: list[tuple[str, list[float | None]]] = [
        ("out tok/s", [own.output_throughput for own in counts]),
        ("req/s", [own.request_throughput for own in counts]),
    ]
    for title, latency in _SWEEP_LATENCIES:
        if any(latency.is_in(result.summary) for result in results):
            columns.append((title, [latency.of(result.summary) for result in results]))
    accepted = [None if result.drafts is None else result.drafts.acceptance_percent for result in results]
    if any(value is not None for value in accepted):
        columns.append(("accepted %", accepted))
    return columns


def num_not_completed(summary: RunSummary) -> int:
    """Return how many requests failed, were rejected or expired."""
    return summary.counts.num_offered - summary.counts.num_completed


def sweep_table(results: Sequence[AnyResult]) -> Table:
    """Return one row per run of a sweep; a column that no run has is left out."""
    table = Table(box=SIMPLE_HEAD, title="Sweep (times in ms)", title_justify="left", pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("done", justify="right")
    columns = sweep_columns(results)
    has_goodput = any(result.summary.score.request_goodput is not None for result in results)
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    if has_goodput:
        table.add_column("good", justify="right")
    for place, result in enumerate(results):
        missing = num_not_completed(result.summary)
        done = number(result.summary.counts.num_completed) + (f" (-{missing})" if missing else "")
        cells = [number(values[place]) for _, values in columns]
        if has_goodput:
            cells.append(percent(result.summary.score.attainment, digits=0))
        table.add_row(Text(result.title), done, *cells)
    return table
