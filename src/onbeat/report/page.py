"""A result as a self-contained HTML page: it loads nothing, so it can be mailed and archived."""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

import orjson

from onbeat.files import write
from onbeat.report.plot import Figure
from onbeat.report.result import INTERRUPTED, Beside, Column, Facts, Lines, Part, Plots, Result, Table

# Nothing may be fetched, whatever a library inside the page would like to do.
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)

PLOTLY = "plotly-basic-4.1.1.min.js.gz"
"""The library of the charts, its makers' bundle with bars and lines alone (MIT; the licence is beside it)."""
_LONG_TEXT = 30
"""Characters; shorter texts stay on one line."""
_WIDTHS = {1: "stack", 2: "grid wide", 3: "grid"}
_WORDS = (
    "TTFT: arrival to first delivery. TBT: every gap between deliveries. TPOT: last minus first delivery, "
    "divided by output tokens less one. E2E: arrival to last delivery. Percentiles interpolate linearly."
)


def write_page(result: Result, path: Path) -> None:
    """Write the page of a result.

    Raises
    ------
    ConfigError : the file cannot be written.
    """
    write(path, _Page().render(result))


class _Page:
    """Collects figures while the body is written, and puts page and data together."""

    def __init__(self) -> None:
        self._figures: list[Figure] = []

    def render(self, result: Result) -> str:
        assets = files("onbeat.report") / "assets"
        body = self._body(result)
        figures = orjson.dumps(self._figures, option=orjson.OPT_SERIALIZE_NUMPY)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(result.title)}</title>\n"
            f"<style>\n{(assets / 'report.css').read_text()}</style>\n</head>\n"
            f"<body>\n<main>\n{body}</main>\n"
            # Packed: a page is mailed and kept, and this is most of it.
            f'<script type="text/plain" id="figures">{_packed(gzip.compress(figures, mtime=0))}</script>\n'
            f'<script type="text/plain" id="plotly">{_packed((assets / PLOTLY).read_bytes())}</script>\n'
            f"<script>\n{(assets / 'report.js').read_text()}</script>\n"
            "</body>\n</html>\n"
        )

    def _body(self, result: Result) -> str:
        body = f"<h1>{html.escape(result.title)}</h1>\n"
        body += _paragraphs([" ".join(result.answer)] if result.answer else [], "answer")
        body += _paragraphs([result.lead] if result.lead else [], "lead")
        tiles = (
            f"<b>{html.escape(value)}</b><span>{html.escape(name)}</span>" for name, value in result.tiles
        )
        body += _box("tiles", (f'<div class="tile">{each}</div>' for each in tiles))
        cards = ((question, _paragraphs([text])) for question, text in result.follows)
        body += _box("grid wide facts", (_card(text, title=question) for question, text in cards))
        interrupted = [INTERRUPTED] if result.is_interrupted else []
        body += _box("note", [_paragraphs([*interrupted, *result.warnings])])
        for section in result.sections:
            content = "" if section.where == "terminal" else "".join(map(self._part, section.parts))
            if content and section.is_folded:
                title = html.escape(section.title)
                body += f"<details><summary>{title}</summary>\n{content}</details>\n"
            elif content:
                body += (section.title and f"<h2>{html.escape(section.title)}</h2>\n") + content
        if not result.settings:
            return body
        shown = [
            (name, value if isinstance(value, str) else json.dumps(value, default=str))
            for name, value in result.settings.items()
        ]
        settings = _table([Column("", "", str)] * 2, shown)
        return (
            f"{body}<details><summary>All settings</summary>{settings}</details>\n<footer>{_WORDS}</footer>\n"
        )

    def _part(self, part: Part) -> str:
        match part:
            case Plots(figures=figures, per_row=per_row):
                return _box(_WIDTHS[per_row], map(self._place, figures))
            case Lines(lines=lines):
                return _paragraphs(lines)
            case Facts(title=title, rows=rows) if rows:
                return _table([Column("", title, str), Column("", "")], rows)
            case Table(columns=columns, cells=cells) if cells:
                caption = _paragraphs([part.caption] if part.caption else [], "lead")
                return _table(columns, cells, part.title) + caption
            case Beside(parts=parts):
                return _box("columns", map(self._part, parts))
        return ""

    def _place(self, figure: Figure | None) -> str:
        if figure is None:
            return ""
        self._figures.append(figure)
        return _card(f'<div data-figure="{len(self._figures) - 1}"></div>', title=figure["title"])


def _card(content: str, title: str) -> str:
    return f'<div class="card"><h3>{html.escape(title)}</h3>{content}</div>\n'


def _box(kind: str, contents: Iterable[str]) -> str:
    """Return a box around what there is; nothing around nothing."""
    content = "".join(contents)
    return f'<div class="{kind}">{content}</div>\n' if content else ""


def _paragraphs(texts: Iterable[str], kind: Literal["", "answer", "lead"] = "") -> str:
    begin = f'<p class="{kind}">' if kind else "<p>"
    return "".join(f"{begin}{html.escape(text)}</p>\n" for text in texts)


def _table(columns: Sequence[Column], rows: Sequence[Sequence[str]], title: str = "") -> str:
    """Return a table; an all-empty header is left out. Long texts become several lines."""
    name = f"<h3>{html.escape(title)}</h3>" if title else ""

    def line(tag: str, cells: Iterable[str]) -> str:
        found = ""
        for place, (column, cell) in enumerate(zip(columns, cells, strict=True)):
            is_text = place and column.show is str
            kind = (' class="left long"' if len(cell) > _LONG_TEXT else ' class="left"') if is_text else ""
            found += f"<{tag}{kind}>{html.escape(cell)}</{tag}>"
        return f"<tr>{found}</tr>"

    titles = [column.title for column in columns]
    head = f"<thead>{line('th', titles)}</thead>" if any(titles) else ""
    lines = "\n".join(line("td", row) for row in rows)
    return f'<div class="card scroll">{name}<table>{head}<tbody>{lines}</tbody></table></div>\n'


def _packed(packed: bytes) -> str:
    return base64.b64encode(packed).decode()
