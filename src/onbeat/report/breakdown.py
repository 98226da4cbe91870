"""Who pays where not all requests are good (`metrics.breakdown`): a sentence, tables and a figure."""

from __future__ import annotations

from collections.abc import Mapping

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
    with_limits,
)
from onbeat.report.result import Beside, Column, Lines, Plots, Section, Table
from onbeat.report.run import outcome_values
from onbeat.report.units import duration, exact_percent, percent, short

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
        drawn = with_limits(decile_figure(breakdown), limits, unit=1e3, axis="y2")
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
