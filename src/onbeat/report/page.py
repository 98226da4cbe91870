"""A result as a self-contained HTML page: it loads nothing, so it can be mailed and archived."""

from __future__ import annotations

import base64
import gzip
import json
from importlib.resources import files
from pathlib import Path

import orjson

from onbeat.files import write
from onbeat.report.plot import Figure
from onbeat.report.result import INTERRUPTED, Result

PLOTLY = "plotly-basic-4.1.1.min.js.gz"
"""The library of the charts, its makers' bundle with bars and lines alone (MIT; the licence is beside it)."""
_LONG_TEXT = 30
"""Characters; shorter texts stay on one line."""
_WIDTHS = {1: "stack", 2: "grid wide", 3: "grid"}


def write_page(result: Result, path: Path) -> None:
    """Write the page of a result.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    from jinja2 import Environment, StrictUndefined  # which a command without --report need not load

    assets, placed = files("onbeat.report") / "assets", list[Figure]()

    def place(figure: Figure) -> int:
        placed.append(figure)
        return len(placed) - 1

    def figures() -> str:
        return _packed(gzip.compress(orjson.dumps(placed, option=orjson.OPT_SERIALIZE_NUMPY), mtime=0))

    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    page = environment.from_string((assets / "report.html").read_text()).render(
        result=result,
        settings=[(name, _shown(value)) for name, value in result.settings.items()],
        interrupted=INTERRUPTED,
        kind_of=lambda part: type(part).__name__,
        place=place,
        figures=figures,
        plotly=_packed((assets / PLOTLY).read_bytes()),
        style=(assets / "report.css").read_text(),
        script=(assets / "report.js").read_text(),
        text_kind=str,
        long_text=_LONG_TEXT,
        widths=_WIDTHS,
    )
    write(path, f"{page}\n")


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _packed(packed: bytes) -> str:
    return base64.b64encode(packed).decode()
