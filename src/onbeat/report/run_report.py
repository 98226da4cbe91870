"""What is said of one run, and of several.

Who pays where not all requests are good (`metrics.breakdown`): a sentence, tables and a figure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from onbeat.metrics.breakdown import Breakdown, GroupOutcome, TenantOutcome
from onbeat.metrics.distribution import percentile_name
from onbeat.metrics.summary import METRICS, LatencyStatistic
from onbeat.report import charts, plot
from onbeat.report.objectives import limits_of, run_text
from onbeat.report.result import Beside, Column, Facts, Lines, Plots, Result, Section, Table
from onbeat.report.run import CLIENT_QUEUE, AnyRun, outcome_values, run_facts
from onbeat.report.units import duration, exact_percent, number, percent, short, whole_percent

SPAN = Column("span", "prompt tokens", str)
OUTCOMES = (
    *(Column("offered", "requests"), Column("attainment", "good", exact_percent)),
    *(Column("longest_wait_ms", "longest wait"), Column("median_ttft_ms", "TTFT P50")),
)


def breakdown_sections(breakdown: Breakdown, limits: Mapping[float, str]) -> list[Section]:
    """Return what is said of one run; nothing where there are no two groups to compare.

    Parameters
    ----------
    limits : of TTFT, ms, each with the classes that have it.
    """
    sections = []
    if line := worst_decile_line(breakdown):
        drawn = plot.with_limits(decile_figure(breakdown), limits, unit=1e3, axis="y2")
        rows = [{"span": prompt_span(own), **outcome_values(own)} for own in breakdown.deciles]
        beside = Beside([Plots([drawn], per_row=1), Table("", (SPAN, *OUTCOMES), rows)])
        sections.append(Section("Objectives by length of prompt (times in ms)", [beside, Lines([line])]))
    if len(breakdown.tenants) > 1:
        tenants = [
            {"tenant": _tenant_name(own), "span": prompt_span(own.outcome), **outcome_values(own.outcome)}
            for own in breakdown.tenants
        ]
        columns = (Column("tenant", "tenant", str), SPAN, *OUTCOMES)
        sections.append(Section("Objectives by tenant (times in ms)", [Table("", columns, tenants)]))
    return sections


def worst_decile_line(breakdown: Breakdown) -> str | None:
    """Return which prompts have the least attainment, and their longest wait; None of nothing to compare."""
    worst = breakdown.worst_decile
    if worst is None:
        return None
    seconds = worst.longest_wait
    wait = duration(seconds) if seconds < 1 else f"{short(seconds)} s"  # minutes would hide how far it is off
    return (
        f"Worst decile (prompts of {prompt_span(worst)} tokens): {percent(worst.attainment)} good, "
        f"longest wait {wait}"
    )


def prompt_span(own: GroupOutcome) -> str:
    """Return the lengths of the prompts of a group, in words."""
    shortest, longest = own.min_prompt_tokens, own.max_prompt_tokens
    return f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"


def _tenant_name(own: TenantOutcome) -> str:
    if own.num_tenants > 1:
        return f"({own.num_tenants:,} others)"
    return own.tenant or "(nobody named)"


def decile_figure(breakdown: Breakdown) -> plot.Figure | None:
    """Return attainment and longest wait of each decile of prompt length; None of fewer than two."""
    deciles = breakdown.deciles
    if len(deciles) < 2:
        return None
    spans = [prompt_span(own) for own in deciles]
    is_worst = [own == breakdown.worst_decile and own.attainment < 1 for own in deciles]
    colours = [plot.MISSED_COLOUR if worst else plot.STREAM_COLOUR for worst in is_worst]
    good = {
        "type": "bar",
        "name": "good",
        "x": spans,
        "y": [round(own.attainment * 100, 2) for own in deciles],
        "customdata": [own.num_offered for own in deciles],
        "marker": {"color": colours, "opacity": 0.7},  # the line in front of the bars must be seen
        "hovertemplate": "%{y:.1f} % of %{customdata:,} requests<extra>%{x} tokens</extra>",
    }
    look = {
        "yaxis": "y2",
        "colour": plot.WAIT_COLOUR,
        "marker": {"size": 9, "line": {"color": "#fff", "width": 1}},
    }
    waits = [round(own.longest_wait, 4) for own in deciles]
    lines = plot.trace(
        "longest wait", spans, waits, "lines+markers", hover="%{y:.2f} s at %{x} tokens", **look
    )
    ticks = {"tickvals": spans, "ticktext": [span.replace(" to ", " to<br>") for span in spans]}
    prompts = plot.axis("prompt tokens", type="category", tickfont={"size": 10}, showgrid=False, **ticks)
    return plot.figure(
        "Good requests and longest wait, by length of prompt",
        [good, lines],
        prompts,
        plot.axis("% of requests good", range=[0, 102]),
        height=380,
        yaxis2=plot.axis("longest wait, s", **plot.RIGHT, rangemode="tozero"),
    )


METRIC_TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "TBT", "e2el": "E2E", CLIENT_QUEUE: "client queue"}
CDF_TITLES = {
    "ttft": "Time to first token (TTFT)",
    "tpot": "Time per output token (TPOT)",
    "itl": "Gaps (TBT)",
}
TRADEOFFS = {
    LatencyStatistic("tpot", "mean"): "Mean TPOT",
    LatencyStatistic("itl", "p99"): "P99 TBT",
    LatencyStatistic("ttft", "mean"): "Mean TTFT",
    LatencyStatistic("ttft", "p99"): "P99 TTFT",
}
CLASS_COLUMNS = (
    *(Column("class", "class", str), Column("slo_ttft_ms", "TTFT objective")),
    *(Column("slo_tbt_ms", "TBT objective"), Column("slo_e2e_ms", "E2E objective")),
    Column("offered", "offered"),
    Column("attainment", "good", exact_percent),
    *(Column("p50_ttft_ms", "TTFT P50"), Column("p99_ttft_ms", "TTFT P99")),
    *(Column("p50_itl_ms", "TBT P50"), Column("p99_itl_ms", "TBT P99")),
)
SWEEP_COLUMNS = (
    *(Column("title", "run", str), Column("done", "done", str)),
    *(Column("output_throughput", "out tok/s"), Column("request_throughput", "req/s")),
    *(Column("mean_ttft_ms", "TTFT mean"), Column("p90_ttft_ms", "P90"), Column("p99_ttft_ms", "P99")),
    *(Column("mean_tpot_ms", "TPOT mean"), Column("p90_tpot_ms", "P90"), Column("p99_tpot_ms", "P99")),
    *(Column("p99_itl_ms", "TBT P99"), Column("max_itl_ms", "max")),
    *(Column("spec_decode_acceptance_rate", "accepted %"), Column("attainment", "good", whole_percent)),
)
ERROR_COLUMNS = (
    *(Column("status", "status", str), Column("cause", "cause", str)),
    *(Column("count", "count"), Column("example", "example", str)),
)


def runs_result(
    runs: Sequence[AnyRun],
    *,
    kind: Literal["simulation", "bench"],
    percentiles: Sequence[float],
    metrics: Sequence[str] = METRICS,
    settings: Mapping[str, Any] | None = None,
    answer: Sequence[str] = (),
) -> Result:
    """Return what is said of runs.

    Parameters
    ----------
    runs : at least one.
    percentiles, metrics : in the table of latencies.
    settings : what the runs were made with.
    """
    first, is_sweep = runs[0], len(runs) > 1
    sections = _sweep_sections(runs) if is_sweep else _run_sections(first, metrics, percentiles)
    what = {"simulation": "Simulation", "bench": "Load test"}[kind]
    return Result(
        kind=kind,
        title=f"{what} of {first.header.model_id}",
        lead=_lead(runs),
        answer=answer,
        tiles=_sweep_tiles(runs) if is_sweep else _run_tiles(first),
        sections=sections,
        warnings=merge_texts(runs),
        settings=settings or {},
        values={"runs": [{"interrupted": run.is_interrupted} | run.values for run in runs]}
        if is_sweep
        else first.values,
        is_interrupted=any(run.is_interrupted for run in runs),
    )


def merge_texts(runs: Sequence[AnyRun]) -> list[str]:
    """Return each warning once, with the runs that it is about unless it is about all."""
    about: dict[str, list[str]] = {}
    for run in runs:
        for text in run.warnings:
            about.setdefault(text, []).append(run.title)
    return [
        text if len(titles) == len(runs) else f"{text} ({', '.join(titles)})"
        for text, titles in about.items()
    ]


def _lead(runs: Sequence[AnyRun]) -> str:
    first = runs[0].header
    what = f"{len(runs)} runs" if len(runs) > 1 else f"{first.num_prompts:,} requests, {first.load}"
    day, _, clock = first.date.partition("-")
    date = f"{day[:4]}-{day[4:6]}-{day[6:]} {clock[:2]}:{clock[2:4]}"
    names = " + ".join(dict.fromkeys(run.header.dataset_name for run in runs))
    asked = run_text(runs[0].summary)
    return " \u00b7 ".join(filter(None, [first.label or first.backend, names, what, asked, date]))


def _run_tiles(run: AnyRun) -> list[tuple[str, str]]:
    counts, latencies, met = run.summary.counts, run.summary.latencies, run.summary.score.attainment
    good = [] if met is None else [("objectives met", exact_percent(met))]
    return [
        *good,
        ("output tokens/s", number(counts.output_throughput)),
        ("requests/s", number(counts.request_throughput)),
        ("TTFT median, ms", number(latencies["ttft"].median_ms)),
        ("TPOT mean, ms", number(latencies["tpot"].mean_ms)),
        ("longest gap, ms", number(latencies["itl"].max_ms)),
        (f"completed of {run.header.num_prompts:,}", f"{counts.num_completed:,}"),
    ]


def _sweep_tiles(runs: Sequence[AnyRun]) -> list[tuple[str, str]]:
    done = [run for run in runs if run.summary.counts.num_completed]
    if not done:
        return [("completed", "0")]
    fastest = max(done, key=lambda run: run.summary.counts.output_throughput)
    goodputs = [value for run in done if (value := run.summary.score.goodput) is not None]
    good = [("most good requests/s", number(max(goodputs)))] if goodputs else []
    return [
        *good,
        ("most output tokens/s", number(fastest.summary.counts.output_throughput)),
        ("reached at", fastest.title),
        ("requests completed", number(sum(run.summary.counts.num_completed for run in done))),
    ]


def _run_sections(run: AnyRun, metrics: Sequence[str], percentiles: Sequence[float]) -> list[Section]:
    columns = latency_columns(percentiles)
    rows = [{"": METRIC_TITLES[name], **run.latencies[name].statistics_ms} for name in metrics]
    classes = [{"class": name, **run.values["classes"][name]} for name in run.summary.classes]
    numbers = Facts("", [*run_facts(run.summary), *run.facts])
    parts = Beside([numbers, Table("Latency (ms)", columns, rows), *run.parts])
    of_classes = Table("", _known(CLASS_COLUMNS, classes), classes if len(classes) > 1 else [])
    curves = [charts.cdf_figure([run], metric, title) for metric, title in CDF_TITLES.items()]
    return [
        Section("Numbers", [parts]),
        Section("Not completed", [Table("", ERROR_COLUMNS, run.errors)]),
        Section("Classes of objectives (times in ms)", [of_classes]),
        *breakdown_sections(run.summary.breakdown, limits_of([run.summary], "ttft")),
        Section("", [Lines(run.lines)]),
        Section("Distributions", [Plots(curves)]),
        Section("Over time", list(_over_time(run, 1))),
    ]


def _over_time(run: AnyRun, num_runs: int) -> Iterator[Plots]:
    yield Plots([charts.load_figure(run), charts.gaps_figure(run, num_runs)])
    yield Plots([charts.timeline_figure(run, num_runs)], per_row=1)


def _sweep_sections(runs: Sequence[AnyRun]) -> list[Section]:
    sections = []
    loads = group_by_load(runs)
    for load, members in loads.items():
        figures = [charts.tradeoff_figure(members, each, title) for each, title in TRADEOFFS.items()]
        kept = [charts.kept_figure(members), charts.goodput_figure(members)]
        title = f"Latency against throughput: {load}"
        sections.append(Section(title, [Plots(kept, per_row=2), Plots(figures, per_row=2)]))
    lines = []
    for run in runs:
        own = [*filter(None, [worst_decile_line(run.summary.breakdown)]), *run.lines]
        lines += [f"{run.title}: {line}" for line in own]
    sections.append(Section("Sweep (times in ms)", [sweep_table(runs), Lines(lines)]))
    errors = [{**error, "run": run.title} for run in runs for error in run.errors]
    columns = (Column("run", "run", str), *ERROR_COLUMNS)
    sections.append(Section("Not completed", [Table("", columns, errors)]))
    for load, members in loads.items():
        curves = [charts.cdf_figure(members, metric, title) for metric, title in CDF_TITLES.items()]
        sections.append(Section(f"Distributions: {load}", [Plots(curves)]))
    for run in runs:
        parts = [
            part
            for each in breakdown_sections(run.summary.breakdown, limits_of([run.summary], "ttft"))
            for part in each.parts
        ]
        title = f"{run.title}: {number(run.summary.counts.output_throughput)} output tokens/s"
        sections.append(Section(title, [*parts, *_over_time(run, len(runs))], "page", is_folded=True))
    return sections


def group_by_load(runs: Sequence[AnyRun]) -> dict[str, list[AnyRun]]:
    """Return the runs of closed loops and those of open loops, in their order."""
    groups: dict[str, list[AnyRun]] = {}
    for run in runs:
        is_closed = run.header.level.is_closed
        name = "closed loop, by concurrency" if is_closed else "open loop, by request rate"
        groups.setdefault(name, []).append(run)
    return groups


def latency_columns(percentiles: Sequence[float]) -> list[Column]:
    """Return the statistics of a latency table; the median is there once, as p50 where that is asked for."""
    median = [] if 50 in percentiles else ["median"]
    names = ["mean", *median, "std", *map(percentile_name, percentiles), "max"]
    titles = [name.upper() if name.startswith("p") else name for name in names]
    return [Column("", "", str), *map(Column, names, titles)]


def sweep_table(runs: Sequence[AnyRun]) -> Table:
    """Return one row a run; a column of which no run knows anything is left out."""
    rows = []
    for run in runs:
        counts = run.summary.counts
        missing = counts.num_offered - counts.num_completed
        done = number(counts.num_completed) + (f" (-{missing:,})" if missing else "")
        rows.append(run.values | {"done": done})
    return Table("", _known(SWEEP_COLUMNS, rows), rows)


def _known(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns of which some row knows anything."""
    return [each for each in columns if any(row.get(each.key) is not None for row in rows)]
