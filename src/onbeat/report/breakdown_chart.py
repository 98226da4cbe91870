"""The figure of who pays where not all requests are good."""

from __future__ import annotations

from onbeat.metrics.breakdown import Breakdown
from onbeat.report.breakdown import prompt_span
from onbeat.report.charts import LOST_COLOUR, STREAM_COLOUR, WAIT_COLOUR
from onbeat.report.page import Figure


def decile_figure(breakdown: Breakdown) -> Figure | None:
    """Return attainment and longest wait of each decile of prompt length; None of fewer than two."""
    deciles = breakdown.deciles
    if len(deciles) < 2:
        return None
    spans = [prompt_span(own) for own in deciles]
    is_worst = [own == breakdown.worst_decile for own in deciles]
    data = [
        {
            "type": "bar",
            "name": "good",
            "x": spans,
            "y": [round(own.attainment * 100, 2) for own in deciles],
            "customdata": [own.num_offered for own in deciles],
            "marker": {
                "color": [LOST_COLOUR if worst else STREAM_COLOUR for worst in is_worst],
                "opacity": 0.7,  # the line in front of the bars must be seen
            },
            "hovertemplate": "%{y:.1f} % of %{customdata:,} requests<extra>%{x} tokens</extra>",
        },
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": "longest wait",
            "x": spans,
            "y": [round(own.longest_wait, 4) for own in deciles],
            "yaxis": "y2",
            "line": {"color": WAIT_COLOUR, "width": 2},
            "marker": {"size": 9, "line": {"color": "#ffffff", "width": 1}},
            "hovertemplate": "%{y:.2f} s<extra>%{x} tokens</extra>",
        },
    ]
    layout = {
        "xaxis": {
            "title": {"text": "prompt tokens"},
            "type": "category",
            "tickvals": spans,
            "ticktext": [span.replace(" to ", "<br>to<br>") for span in spans],
            "tickangle": 0,
            "tickfont": {"size": 10},
            "showgrid": False,
        },
        "yaxis": {"title": {"text": "% of requests good"}, "range": [0, 102]},
        "yaxis2": {
            "title": {"text": "longest wait, s"},
            "overlaying": "y",
            "side": "right",
            "rangemode": "tozero",
            "showgrid": False,
            "tickmode": "auto",
        },
        "showlegend": True,
        "height": 380,
    }
    return {"title": "Good requests and longest wait, by length of prompt", "data": data, "layout": layout}
