"""The report of runs: what was asked for, numbers, distributions, and what happened over time."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onbeat.metrics.summary import METRICS, LatencyStatistic
from onbeat.report import charts, sweep_charts
from onbeat.report.breakdown import (
    DECILE_COLUMNS,
    DECILES_TITLE,
    TENANT_COLUMNS,
    TENANTS_TITLE,
    decile_figure,
    decile_rows,
    tenant_rows,
    worst_decile_line,
)
from onbeat.report.objectives import limits_of, run_text
from onbeat.report.page import Page, heading, notes, table
from onbeat.report.plot import with_limits
from onbeat.report.result import AnyResult, RunHeader, merge_texts
from onbeat.report.table import (
    CLASS_COLUMNS,
    class_rows,
    draft_rows,
    latency_columns,
    latency_rows,
    machine_rows,
    num_not_completed,
    number,
    percent,
    summary_rows,
    sweep_columns,
)

CDF_TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Gaps (TBT)",
}

TRADEOFFS = {
    LatencyStatistic("tpot", "mean"): "Mean TPOT",
    LatencyStatistic("tpot", "p90"): "P90 TPOT",
    LatencyStatistic("itl", "p99"): "P99 TBT",
    LatencyStatistic("ttft", "mean"): "Mean TTFT",
    LatencyStatistic("ttft", "p90"): "P90 TTFT",
    LatencyStatistic("ttft", "p99"): "P99 TTFT",
}


def write_report(
    path: Path,
    results: Sequence[AnyResult],
    *,
    percentiles: Sequence[float],
    settings: dict[str, Any],
    what: str = "Load test",
) -> None:
    """Write the report.

    Parameters
    ----------
    results : at least one run.
    settings : what the runs were made with, shown at the end.
    what : the kind of runs, as the title names it.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    page = Page()
    title = f"{what} of {results[0].header.model_id}"
    body = _head(results, title) + _notes(results, what)
    if len(results) > 1:
        body += _sweep_sections(page, results)
    else:
        body += _run_sections(page, results[0], percentiles)
    body += settings_section(settings)
    page.write(path, title, body)


def _head(results: Sequence[AnyResult], title: str) -> str:
    first = results[0].header
    is_sweep = len(results) > 1
    what = f"{len(results)} runs" if is_sweep else f"{first.num_prompts:,} requests, {describe_load(first)}"
    day, _, clock = first.date.partition("-")
    date = f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}"
    names = " + ".join(dict.fromkeys(result.header.dataset_name for result in results))
    asked = run_text(results[0].summary)
    lead = " \u00b7 ".join(filter(None, [first.label or first.backend, names, what, asked, date]))
    return heading(title, lead, _sweep_tiles(results) if is_sweep else _run_tiles(results[0]))


def describe_load(header: RunHeader) -> str:
    """Return in words how a run's requests were sent."""
    level = header.level
    limit = "" if level.max_concurrency is None else f", at most {level.max_concurrency} open"
    if header.arrivals == "closed loop":
        return f"closed loop of {level.max_concurrency}"
    if level.is_closed:
        return f"{header.arrivals}{limit}"
    kind = "Poisson" if header.arrivals == "gamma" and header.burstiness == 1 else header.arrivals
    return f"{kind} arrivals at {level.request_rate:g} req/s{limit}"


def _run_tiles(result: AnyResult) -> list[tuple[str, str]]:
    summary = result.summary
    counts, latencies = summary.counts, summary.latencies
    tiles = [
        ("output tokens/s", number(counts.output_throughput)),
        ("requests/s", number(counts.request_throughput)),
        ("TTFT median, ms", number(latencies["ttft"].median_ms)),
        ("TPOT mean, ms", number(latencies["tpot"].mean_ms)),
        ("longest gap, ms", number(latencies["itl"].max_ms)),
        (f"completed of {result.header.num_prompts:,}", f"{counts.num_completed:,}"),
    ]
    if summary.score.attainment is not None:
        tiles.append(("objectives met", percent(summary.score.attainment)))
    return tiles


def _sweep_tiles(results: Sequence[AnyResult]) -> list[tuple[str, str]]:
    done = [result for result in results if result.summary.counts.num_completed]
    if not done:
        return [("completed", "0")]
    fastest = max(done, key=lambda result: result.summary.counts.output_throughput)
    tpots, ttfts = (
        [value for result in done if (value := result.summary.latencies[metric].mean_ms)]
        for metric in ("tpot", "ttft")
    )
    goodputs = [value for result in done if (value := result.summary.score.goodput) is not None]
    good = [("most good requests/s", number(max(goodputs)))] if goodputs else []
    return [
        *good,
        ("most output tokens/s", number(fastest.summary.counts.output_throughput)),
        ("reached at", fastest.title),
        ("lowest mean TPOT, ms", number(min(tpots, default=None))),
        ("lowest mean TTFT, ms", number(min(ttfts, default=None))),
        ("requests completed", number(sum(result.summary.counts.num_completed for result in done))),
    ]


def _notes(results: Sequence[AnyResult], what: str) -> str:
    texts = merge_texts(results)
    if any(result.is_interrupted for result in results):
        texts.insert(0, f"This {what.lower()} was interrupted: the numbers cover what had happened by then.")
    return notes(texts) + notes(merge_texts(results, "remarks"), kind="note plain")


def _run_sections(page: Page, result: AnyResult, percentiles: Sequence[float]) -> str:
    return (
        "<h2>Numbers</h2>\n"
        + f'<div class="grid wide">{table(("", ""), summary_rows(result))}'
        + f'<div class="stack">{_latency_table(result, percentiles)}{_named_tables(result)}</div></div>\n'
        + _error_section(result)
        + _class_section(result)
        + _breakdown_section(page, result)
        + "<h2>Distributions</h2>\n"
        + page.grid([charts.cdf_figure([result], metric, title) for metric, title in CDF_TITLES.items()])
        + "<h2>Over time</h2>\n"
        + page.grid([charts.load_figure(result), charts.gaps_figure(result)])
        + page.card(charts.timeline_figure(result))
    )


def _sweep_sections(page: Page, results: Sequence[AnyResult]) -> str:
    body = ""
    loads = sweep_charts.group_by_load(results, lambda result: result.header.level.is_closed)
    for load, members in loads.items():
        body += f"<h2>Latency against throughput: {html.escape(load)}</h2>\n"
        points = [member.point for member in members]
        figures = [
            sweep_charts.tradeoff_figure(points, latency, title) for latency, title in TRADEOFFS.items()
        ]
        kept = [sweep_charts.kept_figure(points), sweep_charts.goodput_figure(points)]
        body += page.grid(kept, per_row=2) + page.grid(figures)
    body += f"<h2>Numbers</h2>\n{_sweep_table(results)}"
    for load, members in loads.items():
        for series, runs in sweep_charts.group_by_series(members).items():
            body += f"<h2>Distributions: {html.escape(' '.join([series, load]).strip())}</h2>\n"
            body += page.grid(
                [charts.cdf_figure(runs, metric, title) for metric, title in CDF_TITLES.items()]
            )
    body += "<h2>Each run over time</h2>\n"
    for result in results:
        rate = number(result.summary.counts.output_throughput)
        title = html.escape(result.title)
        body += f"<details><summary>{title}<span>{rate} output tokens/s</span></summary>\n"
        body += _error_section(result) + _breakdown_section(page, result)
        body += page.grid([charts.load_figure(result), charts.gaps_figure(result, len(results))])
        body += page.card(charts.timeline_figure(result, len(results))) + "</details>\n"
    return body


def _latency_table(result: AnyResult, percentiles: Sequence[float]) -> str:
    names = [name.upper() if name.startswith("p") else name for name in latency_columns(percentiles)]
    return table(["ms", *names], latency_rows(result, METRICS, percentiles))


def _sweep_table(results: Sequence[AnyResult]) -> str:
    rows, columns = [], sweep_columns(results)
    for place, result in enumerate(results):
        rows.append(
            [
                result.title,
                number(result.summary.counts.num_completed),
                number(num_not_completed(result.summary)),
                *(number(values[place]) for _, values in columns),
                percent(result.summary.score.attainment, digits=0),
            ]
        )
    return table(["run", "done", "lost", *(title for title, _ in columns), "good"], rows)


def _error_section(result: AnyResult) -> str:
    if not result.errors:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(error.status)}</td><td class='left'>{html.escape(error.cause)}</td>"
        f"<td>{number(error.count)}</td><td class='wrap'>{html.escape(str(error.example))}</td></tr>"
        for error in result.errors
    )
    head = "<tr><th>status</th><th class='left'>cause</th><th>count</th><th class='left'>example</th></tr>"
    return (
        '<h2 class="bad">Not completed</h2>\n'
        f'<div class="card scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>\n'
    )


def _named_tables(result: AnyResult) -> str:
    tables = {"Replicas": machine_rows(result.machine), "Speculation": draft_rows(result)}
    return "".join(table((title, ""), rows) for title, rows in tables.items() if rows)


def _class_section(result: AnyResult) -> str:
    rows = class_rows(result.summary)
    return f"<h2>Classes of objectives (times in ms)</h2>\n{table(CLASS_COLUMNS, rows)}" if rows else ""


def _breakdown_section(page: Page, result: AnyResult) -> str:
    breakdown = result.summary.breakdown
    deciles, tenants = decile_rows(breakdown), tenant_rows(breakdown)
    body = ""
    if deciles:
        line = html.escape(worst_decile_line(breakdown) or "")
        limits = limits_of(result.summary, "ttft")
        figure = page.card(with_limits(decile_figure(breakdown), limits, unit=1e3, axis="y2"))
        body += f"<h2>{DECILES_TITLE} (times in ms)</h2>\n<p class='lead'>{line}.</p>\n"
        body += f'<div class="grid wide">{figure}{table(DECILE_COLUMNS, deciles)}</div>\n'
    if tenants:
        body += f"<h2>{TENANTS_TITLE} (times in ms)</h2>\n{table(TENANT_COLUMNS, tenants)}"
    return body


def settings_section(settings: dict[str, Any]) -> str:
    """Return what a run was made with, folded up."""
    rows = [
        (name, value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in settings.items()
    ]
    shown = table(("", ""), rows)
    return (
        f"<h2>Settings</h2>\n<details><summary>All settings</summary>{shown}</details>\n"
        "<footer>TTFT: arrival to first delivery. TBT: every gap between deliveries. TPOT: last minus first "
        "delivery, divided by output tokens less one. E2E: arrival to last delivery. Percentiles interpolate "
        "linearly.</footer>\n"
    )
