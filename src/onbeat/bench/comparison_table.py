"""Two results side by side, as a table for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from onbeat.bench.compare import Comparison
from onbeat.report.table import number

INTERVAL_NOTE = (
    "note: the interval covers the spread inside the two runs only, so repeat and alternate the runs before "
    "believing a small difference"
)
"""One run is one draw of the machine's state: the same server, run twice, can come out better or worse."""


def comparison_table(comparison: Comparison, names: tuple[str, str]) -> Table:
    """Return the numbers of two runs side by side, and under them what their intervals leave out."""
    table = Table(box=SIMPLE_HEAD, title=comparison.title or None, title_justify="left", pad_edge=False)
    if any(row.interval is not None for row in comparison.rows):
        table.caption, table.caption_justify = INTERVAL_NOTE, "left"
    table.add_column("")
    for name in (*names, "ratio", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for row in comparison.rows:
        interval = "-" if row.interval is None else f"{row.interval[0]:.3f} .. {row.interval[1]:.3f}"
        style = {"better": "green", "worse": "red"}.get(row.verdict, "")
        cells = (row.name, number(row.baseline), number(row.candidate), f"{row.ratio:.3f}", interval)
        table.add_row(*cells, Text(row.verdict, style=style))
    return table
