"""Who pays where not all requests are good (`metrics.breakdown`), as a sentence and rows of tables."""

from __future__ import annotations

from rich.table import Table

from onbeat.metrics.breakdown import Breakdown, GroupOutcome, TenantOutcome
from onbeat.report.plot import (
    MISSED_COLOUR,
    RIGHT,
    STREAM_COLOUR,
    WAIT_COLOUR,
    Figure,
    axis,
    figure,
    trace,
)
from onbeat.report.table import number, rows_table
from onbeat.report.table import percent as exact_percent
from onbeat.report.units import duration, percent, short

DECILES_TITLE = "Objectives by length of prompt"
TENANTS_TITLE = "Objectives by tenant"
_OUTCOME_COLUMNS = ("requests", "good", "longest wait", "TTFT P50")
DECILE_COLUMNS = ("prompt tokens", *_OUTCOME_COLUMNS)
TENANT_COLUMNS = ("tenant", "prompt tokens", *_OUTCOME_COLUMNS)


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


def decile_rows(breakdown: Breakdown) -> list[tuple[str, ...]]:
    """Return one row a decile of prompt length, as `DECILE_COLUMNS` names it; none of fewer than two."""
    deciles = breakdown.deciles
    return [(prompt_span(own), *_cells(own)) for own in deciles if len(deciles) > 1]


def tenant_rows(breakdown: Breakdown) -> list[tuple[str, ...]]:
    """Return one row a tenant, as `TENANT_COLUMNS` names it; none of fewer than two."""
    tenants = breakdown.tenants
    return [
        (_tenant_name(own), prompt_span(own.outcome), *_cells(own.outcome))
        for own in tenants
        if len(tenants) > 1
    ]


def breakdown_tables(breakdown: Breakdown) -> list[Table]:
    """Return the tables of one run for a terminal; none where there is nothing to compare."""
    sections = (
        (DECILES_TITLE, DECILE_COLUMNS, decile_rows(breakdown)),
        (TENANTS_TITLE, TENANT_COLUMNS, tenant_rows(breakdown)),
    )
    return [rows_table(f"{title} (times in ms)", columns, rows) for title, columns, rows in sections if rows]


def prompt_span(own: GroupOutcome) -> str:
    """Return the lengths of the prompts of a group, in words."""
    shortest, longest = own.min_prompt_tokens, own.max_prompt_tokens
    return f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"


def _cells(own: GroupOutcome) -> tuple[str, ...]:
    return (
        number(own.num_offered),
        exact_percent(own.attainment),
        number(own.longest_wait * 1e3),
        number(None if own.median_ttft is None else own.median_ttft * 1e3),
    )


def _tenant_name(own: TenantOutcome) -> str:
    if own.num_tenants > 1:
        return f"({own.num_tenants:,} others)"
    return own.tenant or "(nobody named)"


def decile_figure(breakdown: Breakdown) -> Figure | None:
    """Return attainment and longest wait of each decile of prompt length; None of fewer than two."""
    deciles = breakdown.deciles
    if len(deciles) < 2:
        return None
    spans = [prompt_span(own) for own in deciles]
    is_worst = [own == breakdown.worst_decile and own.attainment < 1 for own in deciles]
    colours = [MISSED_COLOUR if worst else STREAM_COLOUR for worst in is_worst]
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
        "colour": WAIT_COLOUR,
        "marker": {"size": 9, "line": {"color": "#fff", "width": 1}},
    }
    waits = [round(own.longest_wait, 4) for own in deciles]
    lines = trace("longest wait", spans, waits, "lines+markers", hover="%{y:.2f} s at %{x} tokens", **look)
    ticks = {"tickvals": spans, "ticktext": [span.replace(" to ", " to<br>") for span in spans]}
    prompts = axis("prompt tokens", type="category", tickfont={"size": 10}, showgrid=False, **ticks)
    return figure(
        "Good requests and longest wait, by length of prompt",
        [good, lines],
        prompts,
        axis("% of requests good", range=[0, 102]),
        height=380,
        yaxis2=axis("longest wait, s", **RIGHT, rangemode="tozero"),
    )
