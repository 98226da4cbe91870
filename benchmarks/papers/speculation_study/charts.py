"""The chart of the study: latency by rate, and time per token by users."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from benchmarks.harness.store import Results
from benchmarks.papers.speculation_study import mlc, turbospec
from benchmarks.papers.speculation_study.plan import Plan
from benchmarks.papers.speculation_study.report import latencies, tpots
from onbeat.report.charts import COLOURS

SHOWN_SERVER = "Llama-70B TP 4, n-gram"


def chart(results: Results, plan: Plan) -> go.Figure:
    """Return mean latency over that without drafts by rate, and mean TPOT by users; lower is better."""
    titles = [f"{SHOWN_SERVER}, acceptance {each:g}" for each in turbospec.ACCEPTANCES]
    titles += [f"Llama-3-70B + 8B, {variant}" for variant in mlc.VARIANTS]
    figure = make_subplots(rows=2, cols=3, subplot_titles=titles, vertical_spacing=0.16)
    for column, acceptance in enumerate(turbospec.ACCEPTANCES, start=1):
        levels = latencies(results, plan, SHOWN_SERVER, acceptance)
        for place, mode in enumerate(mode for mode in turbospec.MODES if mode != turbospec.NONE):
            figure.add_trace(
                _line(
                    list(levels),
                    [modes[mode] / modes[turbospec.NONE] for modes in levels.values()],
                    (mode, place, mode == turbospec.ADAPTIVE),
                    is_named=column == 1,
                ),
                row=1,
                col=column,
            )
        figure.add_hline(y=1, line_dash="dot", line_color="#777", row=1, col=column)
    for column, variant in enumerate(mlc.VARIANTS, start=1):
        by_users = tpots(results, plan, variant)
        for place, mode in enumerate(mlc.MODES):
            figure.add_trace(
                _line(
                    list(by_users),
                    [modes[mode] * 1e3 for modes in by_users.values()],
                    (f"{mode} (TPOT)", place + len(turbospec.FIXED), mode == mlc.ADAPTIVE),
                    is_named=column == 1,
                ),
                row=2,
                col=column,
            )
    figure.update_xaxes(type="log", title_text="requests/s", tickvals=list(turbospec.RATES), row=1)
    figure.update_xaxes(type="log", title_text="users", tickvals=list(mlc.CONCURRENCIES), row=2)
    figure.update_yaxes(title_text="latency / without drafts", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="mean TPOT, ms", rangemode="tozero", row=2, col=1)
    figure.update_layout(
        title="Speculative decoding in simulation: adaptive against fixed draft lengths",
        template="plotly_white",
        width=1200,
        height=760,
    )
    return figure


def _line(x: list[int], y: list[float], look: tuple[str, int, bool], *, is_named: bool) -> go.Scatter:
    name, place, is_adaptive = look
    return go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name=name,
        showlegend=is_named,
        line={
            "color": "#111" if is_adaptive else COLOURS[place % len(COLOURS)],
            "width": 3.5 if is_adaptive else 1.8,
            "dash": "dash" if is_adaptive else "solid",
        },
    )
