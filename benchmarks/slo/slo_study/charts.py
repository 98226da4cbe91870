"""The charts of the study."""

from __future__ import annotations

from math import log10

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.slo.slo_study.cells import SIMPLE, STATIC
from benchmarks.slo.slo_study.report import Study
from onbeat.report.charts import COLOURS

CRITERIA = ("90 %", "99 %")
_LEAST_SEEDS = 3
"""For an interval: that of two is as wide as the chart."""
_TICKS = (0.5, 0.7, 1, 1.4, 2, 3, 5, 10)


def ratio_chart(study: Study) -> go.Figure:
    """Return the ratios to each cell's best static budget and to the simple rule, with their intervals."""
    figure = make_subplots(
        cols=len(CRITERIA), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=list(CRITERIA)
    )
    rivals = [name for name in (STATIC, SIMPLE) if name in study.policies]
    for column, criterion in enumerate(CRITERIA, start=1):
        for position, rival in enumerate(rivals):
            found = study.ratios(rival, criterion, "all")
            means = [interval.mean for _, interval, _ in found]
            ends = [
                (each.high - each.mean, each.mean - each.low) if num_seeds >= _LEAST_SEEDS else (0.0, 0.0)
                for _, each, num_seeds in found
            ]
            figure.add_scatter(
                x=means,
                y=[str(cell) for cell, _, _ in found],
                error_x={
                    "array": [high for high, _ in ends],
                    "arrayminus": [low for _, low in ends],
                    "thickness": 1.2,
                    "width": 2,
                },
                mode="markers",
                marker={"color": COLOURS[position], "size": 7},
                name=f"over {rival}",
                showlegend=column == 1,
                row=1,
                col=column,
            )
        figure.add_vline(x=1, line_dash="dot", line_color="#777", col=column)
    figure.update_xaxes(
        type="log",
        range=[log10(0.45), log10(12)],
        tickvals=_TICKS,
        ticktext=[f"{tick:g}" for tick in _TICKS],
        title_text="ratio of capacities",
    )
    names = [str(cell) for cell in study.cells]
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=names,
        range=[len(names) - 0.4, -0.6],
        tickfont={"size": 10},
    )
    figure.update_layout(
        title=f"Capacity of {study.subject} over each cell's best static budget, and over the simple rule",
        template="plotly_white",
        width=1100,
        height=150 + 15 * len(names),
        margin={"l": 230, "r": 30, "t": 90, "b": 60},
        legend={"orientation": "h", "x": 0.55, "y": 1, "yref": "container", "yanchor": "top"},
    )
    return figure
