"""One self-contained HTML page of a load test: it loads nothing, so it can be mailed and archived."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import orjson
from plotly.offline import get_plotlyjs

from onbeat.bench import charts
from onbeat.bench.charts import Figure
from onbeat.bench.result import RunResult, merge_warnings
from onbeat.bench.table import SWEEP_COLUMNS, latency_rows, number, summary_rows
from onbeat.core.errors import ConfigError
from onbeat.metrics.summary import METRICS, percentile_name

# Nothing may be fetched, whatever a library inside the page would like to do.
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)

CDF_TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Gaps (TBT)",
}

TRADEOFFS = {
    "mean_tpot_ms": "Mean TPOT",
    "p90_tpot_ms": "P90 TPOT",
    "p99_itl_ms": "P99 TBT",
    "mean_ttft_ms": "Mean TTFT",
    "p90_ttft_ms": "P90 TTFT",
    "p99_ttft_ms": "P99 TTFT",
}


def write_report(
    path: Path, results: Sequence[RunResult], *, percentiles: Sequence[float], settings: dict[str, Any]
) -> None:
    """Write the report.

    Parameters
    ----------
    results : at least one run.
    settings : what the runs were made with, shown at the end.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    page = _Page()
    body = _head(results) + _notes(results)
    if len(results) > 1:
        body += _sweep_sections(page, results)
    else:
        body += _run_sections(page, results[0], percentiles)
    body += _settings(settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page.render(f"Load test of {results[0].summary['model_id']}", body), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


class _Page:
    """Collects figures while the body is written, and puts page and data together."""

    def __init__(self) -> None:
        self._figures: list[Figure] = []

    def card(self, figure: Figure | None) -> str:
        """Return a place for a figure; nothing if there is none."""
        if figure is None:
            return ""
        self._figures.append(figure)
        place = f'<div data-figure="figure-{len(self._figures)}"></div>'
        return f'<div class="card"><h3>{html.escape(figure["title"])}</h3>{place}</div>\n'

    def grid(self, figures: Sequence[Figure | None]) -> str:
        return f'<div class="grid">{"".join(map(self.card, figures))}</div>\n'

    def render(self, title: str, body: str) -> str:
        assets = files("onbeat.bench") / "assets"
        data = "".join(
            f'<script type="application/json" id="figure-{number}">{_json_for_html(figure)}</script>\n'
            for number, figure in enumerate(self._figures, start=1)
        )
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(title)}</title>\n"
            f"<style>\n{(assets / 'report.css').read_text()}</style>\n</head>\n"
            f"<body>\n<main>\n{body}</main>\n{data}"
            f"<script>{get_plotlyjs()}</script>\n<script>\n{(assets / 'report.js').read_text()}</script>\n"
            "</body>\n</html>\n"
        )


def _json_for_html(value: Any) -> str:
    # "</script>" inside a string would end the element.
    return orjson.dumps(value).decode().replace("</", "<\\/")


def _head(results: Sequence[RunResult]) -> str:
    first = results[0].summary
    is_sweep = len(results) > 1
    what = (
        f"{len(results)} runs" if is_sweep else f"{first['num_prompts']:,} requests, {describe_load(first)}"
    )
    day, _, clock = first["date"].partition("-")
    date = f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}"
    names = " + ".join(dict.fromkeys(result.summary["dataset_name"] for result in results))
    lead = " \u00b7 ".join([first["label"] or first["backend"], names, what, date])
    tiles = _sweep_tiles(results) if is_sweep else _run_tiles(first)
    cells = "".join(f'<div class="tile"><b>{value}</b><span>{name}</span></div>' for name, value in tiles)
    title = html.escape(str(first["model_id"]))
    return (
        f'<h1>Load test of {title}</h1>\n<p class="lead">{html.escape(lead)}</p>\n'
        f'<div class="tiles">{cells}</div>\n'
    )


def describe_load(summary: dict[str, Any]) -> str:
    """Return in words how a run's requests were sent."""
    concurrency = summary["max_concurrency"]
    limit = "" if concurrency is None else f", at most {concurrency} open"
    if summary["arrivals"] == "closed loop":
        return f"closed loop of {concurrency}"
    if summary["request_rate"] == "inf":
        return f"{summary['arrivals']}{limit}"
    kind = "Poisson" if summary["arrivals"] == "gamma" and summary["burstiness"] == 1 else summary["arrivals"]
    return f"{kind} arrivals at {summary['request_rate']:g} req/s{limit}"


def _run_tiles(summary: dict[str, Any]) -> list[tuple[str, str]]:
    tiles = [
        ("output tokens/s", number(summary["output_throughput"])),
        ("requests/s", number(summary["request_throughput"])),
        ("TTFT median, ms", number(summary["median_ttft_ms"])),
        ("TPOT mean, ms", number(summary["mean_tpot_ms"])),
        ("longest gap, ms", number(summary["max_itl_ms"])),
        ("completed", f"{summary['completed']:,} of {summary['num_prompts']:,}"),
    ]
    if summary.get("attainment") is not None:
        tiles.append(("objectives met", f"{summary['attainment']:.1%}"))
    return tiles


def _sweep_tiles(results: Sequence[RunResult]) -> list[tuple[str, str]]:
    done = [result.summary for result in results if result.summary["completed"]]
    if not done:
        return [("completed", "0")]
    fastest = max(done, key=lambda summary: summary["output_throughput"])
    return [
        ("most output tokens/s", number(fastest["output_throughput"])),
        ("reached at", html.escape(str(fastest["title"]))),
        (
            "lowest mean TPOT, ms",
            number(min((s["mean_tpot_ms"] for s in done if s["mean_tpot_ms"]), default=None)),
        ),
        ("lowest mean TTFT, ms", number(min(s["mean_ttft_ms"] for s in done))),
        ("requests completed", number(sum(summary["completed"] for summary in done))),
    ]


def _notes(results: Sequence[RunResult]) -> str:
    notes = merge_warnings(results)
    if any(result.summary["interrupted"] for result in results):
        notes.insert(0, "This load test was interrupted: the numbers cover what had been measured by then.")
    if not notes:
        return ""
    return '<div class="note">' + "".join(f"<p>{html.escape(note)}</p>" for note in notes) + "</div>\n"


def _run_sections(page: _Page, result: RunResult, percentiles: Sequence[float]) -> str:
    return (
        "<h2>Numbers</h2>\n"
        + f'<div class="grid">{_summary_table(result)}{_latency_table(result, percentiles)}</div>\n'
        + _error_section(result)
        + "<h2>Distributions</h2>\n"
        + page.grid([charts.cdf_figure([result], metric, title) for metric, title in CDF_TITLES.items()])
        + "<h2>Over time</h2>\n"
        + page.grid([charts.load_figure(result), charts.gaps_figure(result)])
        + page.card(charts.timeline_figure(result))
    )


def _sweep_sections(page: _Page, results: Sequence[RunResult]) -> str:
    body = ""
    loads = charts.group_by_load(results)
    for load, members in loads.items():
        body += f"<h2>Latency against throughput: {html.escape(load)}</h2>\n"
        body += page.grid([charts.tradeoff_figure(members, key, title) for key, title in TRADEOFFS.items()])
    body += f"<h2>Numbers</h2>\n{_sweep_table(results)}"
    for load, members in loads.items():
        for series, runs in charts.group_by_series(members).items():
            body += f"<h2>Distributions: {html.escape(' '.join([series, load]).strip())}</h2>\n"
            body += page.grid(
                [charts.cdf_figure(runs, metric, title) for metric, title in CDF_TITLES.items()]
            )
    body += "<h2>Each run over time</h2>\n"
    for result in results:
        rate = number(result.summary["output_throughput"])
        title = html.escape(result.config.title)
        body += f"<details><summary>{title}<span>{rate} output tokens/s</span></summary>\n"
        body += _error_section(result)
        body += page.grid([charts.load_figure(result), charts.gaps_figure(result)])
        body += page.card(charts.timeline_figure(result)) + "</details>\n"
    return body


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    start = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="card scroll"><table>{start}<tbody>{lines}</tbody></table></div>\n'


def _summary_table(result: RunResult) -> str:
    return _table(("", ""), summary_rows(result.summary))


def _latency_table(result: RunResult, percentiles: Sequence[float]) -> str:
    names = ["mean", "median", "std", *(percentile_name(p).upper() for p in percentiles), "max"]
    return _table(["ms", *names], latency_rows(result.summary, METRICS, percentiles))


def _sweep_table(results: Sequence[RunResult]) -> str:
    rows = []
    for result in results:
        summary = result.summary
        lost = summary["failed"] + summary["rejected"]
        attainment = summary.get("attainment")
        rows.append(
            [
                result.config.title,
                number(summary["completed"]),
                number(lost),
                *(number(summary.get(key)) for _, key in SWEEP_COLUMNS),
                "-" if attainment is None else f"{attainment:.0%}",
            ]
        )
    return _table(["run", "done", "lost", *(title for title, _ in SWEEP_COLUMNS), "good"], rows)


def _error_section(result: RunResult) -> str:
    errors = result.summary["errors_by_cause"]
    if not errors:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(error['status'])}</td><td class='left'>{html.escape(error['cause'])}</td>"
        f"<td>{number(error['count'])}</td><td class='wrap'>{html.escape(str(error['example']))}</td></tr>"
        for error in errors
    )
    head = "<tr><th>status</th><th class='left'>cause</th><th>count</th><th class='left'>example</th></tr>"
    return (
        '<h2 class="bad">Not completed</h2>\n'
        f'<div class="card scroll"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>\n'
    )


def _settings(settings: dict[str, Any]) -> str:
    rows = [
        (name, value if isinstance(value, str) else json.dumps(value)) for name, value in settings.items()
    ]
    table = _table(("", ""), rows)
    return (
        f"<h2>Settings</h2>\n<details><summary>All settings of this load test</summary>{table}</details>\n"
        "<footer>TTFT: arrival to first delivery. TBT: every gap between deliveries. TPOT: last minus first "
        "delivery, divided by output tokens less one. E2E: arrival to last delivery. Percentiles interpolate "
        "linearly.</footer>\n"
    )
