"""The charts of the study."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import plotly.graph_objects as go

from onbeat.report.charts import COLOURS
from slo_study.report import SUBJECT, Study

UNBOUND_COLOUR = "#b8bec6"


def ratio_chart(study: Study) -> go.Figure:
    """Return the ratio to each cell's best hand-tuned policy with its interval; those that bind in colour."""
    figure = go.Figure()
    shares = list(study.cells)
    num_rows = max(len(cells) for cells in study.cells.values())
    for position, share in enumerate(shares):
        for binds in (True, False):
            points = []
            for cell in study.cells[share]:
                best = cell.best_static()
                ratio = cell.ratio(SUBJECT, best).interval if best else None
                if ratio is not None and cell.binds == binds:
                    points.append((str(cell.cell), ratio))
            ends = [(ratio.high - ratio.mean, ratio.mean - ratio.low) for _, ratio in points]
            figure.add_scatter(
                x=[ratio.mean for _, ratio in points],
                y=[name for name, _ in points],
                error_x={
                    "array": [high if isfinite(high) else 0 for high, _ in ends],
                    "arrayminus": [low if isfinite(high) else 0 for high, low in ends],
                    "thickness": 1.2,
                    "width": 2,
                },
                mode="markers",
                marker={
                    "color": COLOURS[position] if binds else UNBOUND_COLOUR,
                    "size": 8,
                    "symbol": "circle" if position == 0 else "diamond",
                },
                name=f"{float(share) * 100:g} %" + ("" if binds else ", does not bind"),
            )
    figure.add_vline(x=1, line_dash="dot", line_color="#777")
    figure.update_layout(
        title=f"Capacity of {SUBJECT} over the best hand-tuned policy of each cell",
        xaxis={"type": "log", "title": {"text": "ratio, with 95 % interval"}, "dtick": "D2"},
        yaxis={"type": "category", "autorange": "reversed"},
        template="plotly_white",
        width=960,
        height=160 + 19 * num_rows,
        legend={"orientation": "h", "x": 0, "y": 1.04},
    )
    return figure


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
            annotation={"text": name, "y": 0.98 - 0.08 * position, "xanchor": "right"},
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
