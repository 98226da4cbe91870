"""The charts of the study."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from math import isfinite, log10
from pathlib import Path

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from onbeat.planner.paired import Interval
from onbeat.report.charts import COLOURS
from slo_study.analysis import CellResults
from slo_study.cells import BOUND
from slo_study.report import SUBJECT, Study

UNBOUND_COLOUR = "#b8bec6"


def ratio_chart(study: Study) -> go.Figure:
    """Return the ratio to each cell's best hand-tuned policy with its interval, and that of the bound."""
    shares = list(study.cells)
    figure = make_subplots(
        cols=len(shares),
        shared_yaxes=True,
        horizontal_spacing=0.03,
        subplot_titles=[f"at {float(share) * 100:g} %" for share in shares],
    )
    for column, share in enumerate(shares, start=1):
        for binds in (True, False):
            cells = [cell for cell in study.cells[share] if cell.binds == binds]
            colour = COLOURS[0] if binds else UNBOUND_COLOUR
            name = "binds" if binds else "does not bind"
            figure.add_trace(_ratios(cells, name, colour, is_named=column == 1), row=1, col=column)
        figure.add_trace(_bounds(study.cells[share], is_named=column == 1), row=1, col=column)
        figure.add_vline(x=1, line_dash="dot", line_color="#777", col=column)
    ticks = [0.5, 0.7, 1, 1.3, 2, 3, 5, 10, 20]
    figure.update_xaxes(
        type="log",
        range=[log10(0.45), log10(22)],
        tickvals=ticks,
        ticktext=[f"{tick:g}" for tick in ticks],
        title_text="ratio, with 95 % interval",
    )
    names = sorted({str(cell.cell) for cells in study.cells.values() for cell in cells})
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=names,
        range=[len(names) - 0.4, -0.6],
        tickfont={"size": 11},
    )
    figure.update_layout(
        title=f"Capacity of {SUBJECT} over the best hand-tuned policy of each cell",
        template="plotly_white",
        width=1100,
        height=150 + 19 * len(names),
        margin={"l": 190, "r": 30, "t": 90, "b": 60},
        legend={"orientation": "h", "x": 0.55, "y": 1, "yref": "container", "yanchor": "top"},
    )
    return figure


def _ratios(cells: Sequence[CellResults], name: str, colour: str, *, is_named: bool) -> go.Scatter:
    found = [(cell, _over_best(cell, SUBJECT)) for cell in cells]
    points = [(str(cell.cell), ratio) for cell, ratio in found if ratio is not None]
    ends = [(ratio.high - ratio.mean, ratio.mean - ratio.low) for _, ratio in points]
    return go.Scatter(
        x=[ratio.mean for _, ratio in points],
        y=[label for label, _ in points],
        error_x={
            "array": [high if isfinite(high) else 0 for high, _ in ends],
            "arrayminus": [low if isfinite(high) else 0 for high, low in ends],
            "thickness": 1.4,
            "width": 3,
        },
        mode="markers",
        marker={"color": colour, "size": 8},
        name=name,
        showlegend=is_named,
    )


def _bounds(cells: Sequence[CellResults], *, is_named: bool) -> go.Scatter:
    found = [(cell, _over_best(cell, BOUND)) for cell in cells]
    points = [(str(cell.cell), ratio.mean) for cell, ratio in found if ratio is not None]
    return go.Scatter(
        x=[mean for _, mean in points],
        y=[label for label, _ in points],
        mode="markers",
        marker={"symbol": "line-ns", "size": 12, "line": {"width": 2, "color": "#444"}},
        name="no policy beyond",
        showlegend=is_named,
    )


def _over_best(cell: CellResults, policy: str) -> Interval | None:
    best = cell.best_static()
    return cell.ratio(policy, best).interval if best else None


def attainment_chart(
    title: str, curves: Mapping[str, Sequence[tuple[float, float]]], bounds: Mapping[str, float]
) -> go.Figure:
    """Return attainment against rate, a curve a policy, and bounds as lines.

    Parameters
    ----------
    curves : policy -> (requests per second, share of good requests).
    bounds : what bounds whom -> requests per second.
    """
    figure = go.Figure()
    for position, (policy, points) in enumerate(curves.items()):
        is_subject = policy == SUBJECT
        figure.add_scatter(
            x=[rate for rate, _ in points],
            y=[share * 100 for _, share in points],
            mode="lines+markers",
            name=policy,
            line={
                "color": COLOURS[position % len(COLOURS)],
                "width": 3.5 if is_subject else 1.8,
                "dash": "solid" if position < len(COLOURS) else "dash",
            },
        )
    for position, (name, rate) in enumerate(bounds.items()):
        figure.add_vline(
            x=rate,
            line_dash="dash",
            line_color="#444",
            annotation={"text": name, "y": 0.6 - 0.08 * position, "xanchor": "right"},
        )
    figure.add_hline(y=90, line_dash="dot", line_color="#999")
    figure.update_layout(
        title=title,
        xaxis_title="requests/s",
        yaxis={"title": {"text": "good requests, %"}, "range": [0, 101]},
        template="plotly_white",
        width=960,
        height=500,
    )
    return figure


def write_image(figure: go.Figure, path: Path) -> Path:
    """Write a chart as PNG where a browser is at hand to draw it, else as HTML; return what was written."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        written = path.with_suffix(".html")
        figure.write_html(written, include_plotlyjs=True)
        return written
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "chart.html"
        figure.write_html(page, include_plotlyjs=True, config={"displayModeBar": False})
        width, height = figure.layout.width, figure.layout.height
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={folder}/profile", f"--window-size={width},{height}",
             "--virtual-time-budget=5000", f"--screenshot={path}", page.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
    return path
