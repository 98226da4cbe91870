"""Plots as PNG files, drawn by plotly and a headless browser."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import plotly.graph_objects as go

COLOURS = ("#2e6f95", "#d1495b", "#edae49", "#66a182", "#8d6a9f", "#7a7a7a")
WIDTH, HEIGHT = 900, 480
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


# Plotly's own ticks of a logarithmic axis leave out the zeros of most numbers.
TICKS = [digit * 10.0**power for power in range(-3, 6) for digit in (1, 2, 5)]
LOG_AXIS = {"type": "log", "tickvals": TICKS, "ticktext": [f"{tick:g}" for tick in TICKS]}
OBJECTIVE = {"line_dash": "dot", "line_color": "#777"}


def figure(title: str, x: str, y: str) -> go.Figure:
    made = go.Figure()
    made.update_layout(
        title=title,
        xaxis_title=x,
        yaxis_title=y,
        template="plotly_white",
        width=WIDTH,
        height=HEIGHT,
        legend={"orientation": "h", "x": 0, "y": 1.1},
    )
    return made


def save(made: go.Figure, path: Path) -> str:
    """Write a PNG; returns the Markdown that shows it, or says that no browser was there to draw it."""
    browser = _browser()
    if browser is None:
        print(f"no browser ({', '.join(BROWSERS)}) to draw {path.name}", flush=True)
        return ""
    path.parent.mkdir(parents=True, exist_ok=True)
    if problem := _screenshot(made, path, browser, (WIDTH + 20, HEIGHT + 20)):
        print(f"{path.name} could not be drawn: {problem}", flush=True)
        return ""
    return f"![{made.layout.title.text}](../../docs/images/{path.name})"


def _browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


def _screenshot(made: go.Figure, path: Path, browser: str, size: tuple[int, int]) -> str:
    """Draw a figure; returns what went wrong, or an empty text.

    Parameters
    ----------
    size : of the window, pixels.
    """
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "plot.html"
        made.write_html(page, include_plotlyjs=True, config={"displayModeBar": False, "staticPlot": True})
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={folder}/profile", f"--window-size={size[0]},{size[1]}"]
        command += ["--virtual-time-budget=5000", f"--screenshot={path}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return "" if done.returncode == 0 and path.exists() else done.stderr[-300:] or "the browser wrote nothing"
