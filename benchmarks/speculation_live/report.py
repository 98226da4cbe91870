"""The page of a measurement: tables, verdicts, commands, a plot; all from the saved document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import plots
from harness.pages import markdown_table, percent, write_document
from plotly.subplots import make_subplots

from . import verdict
from .verdict import ADAPTIVE, OFF, Cell, Interval, Metric

Document = dict[str, Any]
SHORT = {"output_throughput": "out tok/s", "mean_tpot_ms": "TPOT, ms"}
INTRO = """Every server gets the same tasks as chats of one message, greedy, in closed loops; an answer ends
where the model ends it. Servers take turns, all others suspended, and turns change with every load. Prefix
caching is off everywhere, since tasks come again in later rounds. Cells are medians over the rounds; ratios
are taken within a round and above 1 where the adaptive server is better; intervals are 95 % bootstrap
intervals of their median, rounds drawn with replacement. The best other server is chosen from these very
runs, so chance is on its side. Client and server share the machine."""


def write(document: Document, stem: Path, images: Path) -> None:
    """Write STEM.json and STEM.md, and the plot."""
    runs = counted(document)
    image = plots.save(draw(runs), images / "speculation-live.png") if runs else ""
    write_document(document, stem, render(document, image))


def render(document: Document, image: str) -> str:
    """Return the page."""
    runs = counted(document)
    parts = ["# Speculation by prompt lookup on this CPU: off, adaptive, fixed lengths"]
    if runs:
        num_rounds = 1 + max(run["round"] for run in document["runs"])
        share_left_out = 1 - len(runs) / len(document["runs"])
        parts += [
            f"{document['at']}, commit {document['commit']}; {document['machine']}.",
            f"    {document['command']}",
            document["remark"],
            f"{num_rounds} interleaved rounds. {INTRO}",
            disturbance_part(document, share_left_out),
            single_part(runs),
            *(load_part(runs, task_set) for task_set in dict.fromkeys(run["task_set"] for run in runs)),
            image,
            drafts_part(runs),
            limits_part(document["limits"]),
            commands_part(document["servers"]),
        ]
    return "\n\n".join(part for part in [*parts, equality_part(document["equality"])] if part) + "\n"


def counted(document: Document) -> list[verdict.Run]:
    """Return the runs that the page is about."""
    runs: list[verdict.Run] = document["runs"]
    return list(runs) if document.get("is_busy") else verdict.undisturbed(runs)


def disturbance_part(document: Document, share_left_out: float) -> str:
    """Return what was done about others on the machine."""
    if document.get("is_busy"):
        others = statistics.median(run["cpu"]["others"] for run in document["runs"])
        return (
            f"**The machine was busy with other work**, which took {percent(others)} of the processors in "
            "the median run (`--busy` counts such rounds). Only ratios within rounds mean anything."
        )
    return (
        f"Rounds of a load in which others (the machine's host counts) took more than "
        f"{percent(verdict.DISTURBED_SHARE)} of the processors during one of the runs are left out: "
        f"{percent(share_left_out)} of all runs. A load is measured no further once it has "
        f"{verdict.FEWEST_ROUNDS} rounds and both intervals are at most {verdict.SETTLED_WIDTH} wide."
    )


def single_part(runs: Sequence[verdict.Run]) -> str:
    """Return what speculation gains for editing tasks one at a time."""
    cell = Cell("editing", 1)
    ratios = verdict.paired_ratios(runs, OFF, cell, "mean_tpot_ms")
    if not ratios:
        return ""
    found = verdict.median_interval(ratios)
    off, adaptive = (_median(runs, server, cell, "mean_tpot_ms") for server in (OFF, ADAPTIVE))
    answer = "kept" if found.median >= verdict.ASKED_TPOT_RATIO else "missed"
    return (
        f"## Editing, one task at a time\n\nMean TPOT {off:.2f} ms without and {adaptive:.2f} ms with "
        f"speculation: **{found.text()} times better** (asked: {verdict.ASKED_TPOT_RATIO}, {answer})."
    )


def load_part(runs: Sequence[verdict.Run], task_set: str) -> str:
    """Return the tables of one set of tasks by concurrency."""
    cells = [cell for cell in verdict.cells_of(runs) if cell.task_set == task_set]
    tables = [_table(runs, cells, metric) for metric in verdict.METRICS]
    share = statistics.fmean(run["copied_share"] for run in runs if run["task_set"] == task_set)
    return (
        f"## {task_set.capitalize()}: adaptive against the best other server\n\n{percent(share)} of the "
        "runs of four tokens in the answers are in their prompt. Asked: the interval reaches "
        f"{verdict.ASKED_REACH} and the median is at least {verdict.ASKED_MEDIAN}.\n\n" + "\n\n".join(tables)
    )


def drafts_part(runs: Sequence[verdict.Run]) -> str:
    """Return what was drafted and accepted."""
    servers = [server for server in dict.fromkeys(run["server"] for run in runs) if server != OFF]
    rows = [[*cell, *(_drafts(runs, server, cell) for server in servers)] for cell in verdict.cells_of(runs)]
    table = markdown_table(["tasks", "concurrency", *servers], rows)
    return f"## Drafts\n\nVerified for each output token, and the share of them that was accepted:\n\n{table}"


def limits_part(limits: Sequence[dict[str, float]]) -> str:
    """Return the machine's limits, before the first round and after each."""
    rows = [[index or "before", *one.values()] for index, one in enumerate(limits)]
    return "## The machine's limits\n\n" + markdown_table(["after round", *limits[0]], rows)


def commands_part(servers: dict[str, dict[str, Any]]) -> str:
    """Return how the servers were started."""
    lines = "\n".join(f"    {entry['command']}" for entry in servers.values())
    return f"## The servers\n\n{lines}"


def equality_part(equality: Document | None) -> str:
    """Return whether all servers gave the same tokens."""
    if not equality:
        return ""
    rows = [
        [row["sampling"], row["server"], row["num_tokens"], len(row["different"]) or "none"]
        for row in equality["rows"]
    ]
    table = markdown_table(["sampling", "server", "tokens", "answers that differ from off's"], rows)
    return (
        f"## The same tokens\n\n{equality['at']}, commit {equality['commit']}, float32, "
        f"{equality['num_tasks']} tasks at concurrency {equality['concurrency']}:\n\n"
        f"    {equality['command']}\n\n{table}"
    )


def draw(runs: Sequence[verdict.Run]) -> Any:
    """Return the plot: output and TPOT by concurrency, a row for each set of tasks."""
    sets = list(dict.fromkeys(run["task_set"] for run in runs))
    titles = [f"{task_set}: {SHORT[metric]}" for task_set in sets for metric in verdict.METRICS]
    made = make_subplots(rows=len(sets), cols=2, subplot_titles=titles, vertical_spacing=0.16)
    servers = list(dict.fromkeys(run["server"] for run in runs))
    levels = sorted({run["concurrency"] for run in runs})
    for row, task_set in enumerate(sets, start=1):
        for column, metric in enumerate(verdict.METRICS, start=1):
            for server, colour in zip(servers, plots.COLOURS, strict=False):
                points = {
                    level: _median(runs, server, Cell(task_set, level), metric)
                    for level in levels
                    if verdict.by_round(runs, server, Cell(task_set, level), metric)
                }
                made.add_scatter(
                    x=list(points),
                    y=list(points.values()),
                    mode="lines+markers",
                    line={"color": colour, "width": 3 if server == ADAPTIVE else 1.5},
                    name=server,
                    showlegend=row == column == 1,
                    row=row,
                    col=column,
                )
    made.update_xaxes(type="log", tickvals=levels)
    made.update_xaxes(title_text="concurrency", row=len(sets))
    made.update_yaxes(rangemode="tozero")
    made.update_layout(
        title="Speculation by prompt lookup",
        template="plotly_white",
        width=plots.WIDTH,
        height=plots.HEIGHT,
        margin={"t": 80, "b": 50},
        legend={"orientation": "h", "x": 0.35, "y": 1.2},
    )
    return made


def _table(runs: Sequence[verdict.Run], cells: Sequence[Cell], metric: Metric) -> str:
    servers = list(dict.fromkeys(run["server"] for run in runs))
    rows = []
    for cell in cells:
        other = verdict.best_other(runs, cell, metric)
        found = verdict.median_interval(verdict.paired_ratios(runs, other, cell, metric))
        values = [_median(runs, server, cell, metric) for server in servers]
        num_rounds = len(verdict.by_round(runs, ADAPTIVE, cell, metric))
        kept = "yes" if found.keeps_up else "no"
        rows.append([cell.concurrency, num_rounds, *values, other, _against(found), kept])
    columns = ["concurrency", "rounds", *(f"{server}, {SHORT[metric]}" for server in servers)]
    return markdown_table([*columns, "best other", "adaptive over it", "kept"], rows)


def _against(found: Interval) -> str:
    return f"**{found.median:.2f}** ({found.low:.2f} to {found.high:.2f})"


def _median(runs: Sequence[verdict.Run], server: str, cell: Cell, metric: Metric) -> float | None:
    values = verdict.by_round(runs, server, cell, metric)
    return statistics.median(values.values()) if values else None


def _drafts(runs: Sequence[verdict.Run], server: str, cell: Cell) -> str | None:
    own = [run for run in runs if (run["server"], run["task_set"], run["concurrency"]) == (server, *cell)]
    keys = ("num_drafted", "num_accepted", "total_output_tokens")
    drafted, accepted, tokens = (sum(run[key] for run in own) for key in keys)
    return f"{drafted / tokens:.2f}, {percent(accepted / drafted)}" if drafted else None
