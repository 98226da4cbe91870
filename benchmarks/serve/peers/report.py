"""The page of a comparison: tables, machine limits, commands, a plot; all from the saved document."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotly.subplots import make_subplots

from benchmarks.harness import plots
from benchmarks.harness.pages import markdown_table, percent, show, write_document

from .pairs import Spread, by_round, ratio, spread
from .scores import scored

Document = dict[str, Any]
COLUMNS = ["concurrency", "server", "out tok/s", "ours over it", "TTFT P50 / P99, ms"]
COLUMNS += ["TBT P50 / P99 / max, ms", "TPOT, ms", "good", "CPU: server, client, others"]
SHORT_COLUMNS = ["server", "short ones good", "TTFT P50 / P99, ms", "TBT P99 / max, ms", "all: out tok/s"]
SHORT_COLUMNS += ["ours over it"]


def write(document: Document, stem: Path, images: Path) -> None:
    """Write STEM.json and STEM.md, and the plot."""
    image = plots.save(draw(document), images / f"peers-{document['name']}.png")
    write_document(document, stem, render(document, image))


def render(document: Document, image: str) -> str:
    """Return the page."""
    num_rounds = 1 + max(run["round"] for run in document["runs"])
    parts = [
        f"# {' against '.join(document['names'])}",
        f"{document['at']}, commit {document['commit']}; {document['machine']}.",
        f"    {document['command']}",
        f"{num_rounds} interleaved rounds. {turns_text(document['turns'])} {LOADS_TEXT} Good: "
        f"{document['objectives']}. Cells are medians over the rounds, with least and most in brackets; "
        "ratios are taken within a round.",
        main_table(document),
        short_table(document),
        image,
        tuning_part(document),
        limits_part(document),
        starts_part(document),
        commands_part(document),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


LOADS_TEXT = (
    "Closed loops; about 190 tokens in and 150 out (log-normal), greedy, no early end; the same prompts "
    "for all servers of a round, new words in every round. Client and server share the machine."
)


def turns_text(turns: str) -> str:
    """Return how servers took turns."""
    if turns == "suspend":
        return "All servers are up, suspended but for the one whose turn it is; turns change with every load."
    return "Each server is started, loaded and stopped in turn."


def main_table(document: Document) -> str:
    """Return the table of loads without long prompts."""
    runs, (ours, *_) = document["runs"], document["names"]
    rows = []
    for load in plain_loads(runs):
        for name in document["names"]:
            numbers = _Numbers(runs, name, load)
            against = None if name == ours else ratio(runs, ours, name, load, "output_throughput")
            rows.append(
                [
                    load,
                    name,
                    numbers.spread("output_throughput", 1),
                    _text(against),
                    numbers.medians("p50_ttft_ms", "p99_ttft_ms"),
                    numbers.medians("p50_itl_ms", "p99_itl_ms", "max_itl_ms"),
                    numbers.medians("mean_tpot_ms"),
                    numbers.spread("attainment", 2),
                    ", ".join(
                        percent(numbers.median(f"cpu.{who}")) for who in ("server", "client", "others")
                    ),
                ]
            )
    return markdown_table(COLUMNS, rows) if rows else ""


def short_table(document: Document) -> str:
    """Return the tables of loads with long prompts among the short ones."""
    runs, (ours, *_) = document["runs"], document["names"]
    parts = []
    for load in long_loads(runs):
        rows = []
        for name in document["names"]:
            numbers = _Numbers(runs, name, load)
            against = None if name == ours else ratio(runs, ours, name, load, "output_throughput")
            rows.append(
                [
                    name,
                    numbers.spread("short.attainment", 2),
                    numbers.medians("short.p50_ttft_ms", "short.p99_ttft_ms"),
                    numbers.medians("short.p99_itl_ms", "short.max_itl_ms"),
                    numbers.spread("output_throughput", 1),
                    _text(against),
                ]
            )
        parts.append(
            f"Concurrency {load} (one prompt in eight has 1,500 tokens), the other requests:\n\n"
            + markdown_table(SHORT_COLUMNS, rows)
        )
    return "\n\n".join(parts)


def tuning_part(document: Document) -> str:
    """Return what was found in looking for a peer's best setting."""
    runs = document["tuning"]
    if not runs:
        return ""
    loads = list(dict.fromkeys(run["load"] for run in runs))
    rows = []
    for name in dict.fromkeys(run["server"] for run in runs):
        own = {run["load"]: run for run in runs if run["server"] == name}
        rows.append([name, *(f"{scored(own[load]):.2f}" for load in loads)])
    intro = (
        "Looking for the peer's best setting: share of good requests (of the short ones beside long prompts)."
    )
    return f"{intro}\n\n{markdown_table(['server', *loads], rows)}"


def limits_part(document: Document) -> str:
    """Return the machine's limits, before the first round and after each."""
    limits = document["limits"]
    names = list(limits[0])
    rows = [[index or "before", *(one[name] for name in names)] for index, one in enumerate(limits)]
    return "Limits of the machine:\n\n" + markdown_table(["after round", *names], rows)


def starts_part(document: Document) -> str:
    """Return how long servers took to answer, and the memory they held then."""
    rows = []
    for name in dict.fromkeys(start["server"] for start in document["starts"]):
        own = [start for start in document["starts"] if start["server"] == name]
        seconds = spread([start["seconds"] for start in own])
        rows.append([name, _text(seconds, 1), f"{max(start['memory_bytes'] for start in own) / 2**20:.0f}"])
    return markdown_table(["server", "start, s", "memory at start, MiB"], rows)


def commands_part(document: Document) -> str:
    """Return how the servers were started."""
    lines = []
    for name, entry in document["servers"].items():
        settings = " ".join(f"{key}={value}" for key, value in entry["environment"].items())
        command = f"{settings} {entry['command']}".strip()
        lines.append(f"{name} ({entry['about']}):\n\n    {command}")
    return "\n\n".join(lines)


def draw(document: Document) -> Any:
    """Return the plot: output and attainment by concurrency."""
    runs = [run for run in document["runs"] if run["short"] is None]
    made = make_subplots(cols=2, subplot_titles=["output tokens/s", "share of good requests"])
    for name, colour in zip(document["names"], plots.COLOURS, strict=False):
        for column, key in ((1, "output_throughput"), (2, "attainment")):
            made.add_scatter(**_line(runs, name, key, colour), showlegend=column == 1, row=1, col=column)
    made.update_xaxes(
        title_text="concurrency", type="log", tickvals=[int(load) for load in plain_loads(runs)]
    )
    made.update_yaxes(rangemode="tozero", col=1)
    made.update_yaxes(range=[0, 1.03], col=2)
    made.update_layout(
        title=f"{' and '.join(document['names'])} on this CPU",
        template="plotly_white",
        width=plots.WIDTH,
        height=plots.HEIGHT,
        legend={"orientation": "h", "x": 0, "y": -0.2},
    )
    return made


def _line(runs: Sequence[dict[str, Any]], name: str, key: str, colour: str) -> dict[str, Any]:
    found = [
        (int(load), spread(list(by_round(runs, name, load, key).values()))) for load in plain_loads(runs)
    ]
    points = [(level, values) for level, values in found if values is not None]
    return {
        "x": [level for level, _ in points],
        "y": [values.median for _, values in points],
        "error_y": {
            "array": [values.high - values.median for _, values in points],
            "arrayminus": [values.median - values.low for _, values in points],
        },
        "mode": "lines+markers",
        "line": {"color": colour},
        "name": name,
    }


def plain_loads(runs: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["load"] for run in runs if run["short"] is None))


def long_loads(runs: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(run["load"] for run in runs if run["short"] is not None))


class _Numbers:
    """Values of one server under one load, over the rounds."""

    def __init__(self, runs: Sequence[dict[str, Any]], server: str, load: str) -> None:
        self._runs, self._server, self._load = runs, server, load

    def spread(self, key: str, digits: int) -> str:
        return _text(self._spread(key), digits)

    def median(self, key: str) -> float | None:
        found = self._spread(key)
        return None if found is None else found.median

    def medians(self, *keys: str) -> str:
        return " / ".join(show(self.median(key)) for key in keys)

    def _spread(self, key: str) -> Spread | None:
        return spread(list(by_round(self._runs, self._server, self._load, key).values()))


def _text(values: Spread | None, digits: int = 2) -> str:
    return "" if values is None else values.text(digits)
