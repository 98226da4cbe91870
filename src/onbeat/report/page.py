"""A self-contained HTML page: it loads nothing, so it can be mailed and archived."""

from __future__ import annotations

import base64
import gzip
import html
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

import orjson

from onbeat.core.errors import ConfigError
from onbeat.report.plot import Figure

# Nothing may be fetched, whatever a library inside the page would like to do.
CONTENT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
)

PLOTLY = "plotly-basic-4.1.1.min.js.gz"
"""The library of the charts, its makers' bundle with bars and lines alone (MIT; the licence is beside it)."""
_LONG_TEXT = 30
"""Characters; shorter texts stay on one line."""


class Page:
    """Collects figures while the body is written, and puts page and data together."""

    def __init__(self) -> None:
        self._figures: list[Figure] = []

    def card(self, figure: Figure | None) -> str:
        """Return a place for a figure; nothing if there is none."""
        if figure is None:
            return ""
        self._figures.append(figure)
        place = f'<div data-figure="{len(self._figures) - 1}"></div>'
        return f'<div class="card"><h3>{html.escape(figure["title"])}</h3>{place}</div>\n'

    def grid(self, figures: Sequence[Figure | None], *, per_row: Literal[2, 3] = 3) -> str:
        """Return places for figures side by side, at most so many in a row."""
        name = "grid" if per_row == 3 else "grid wide"
        return f'<div class="{name}">{"".join(map(self.card, figures))}</div>\n'

    def render(self, title: str, body: str) -> str:
        """Return the whole page around a body made of HTML."""
        assets = files("onbeat.report") / "assets"
        figures = orjson.dumps(self._figures, option=orjson.OPT_SERIALIZE_NUMPY)
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{CONTENT_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{html.escape(title)}</title>\n"
            f"<style>\n{(assets / 'report.css').read_text()}</style>\n</head>\n"
            f"<body>\n<main>\n{body}</main>\n"
            # Packed: a page is mailed and kept, and this is most of it.
            f'<script type="text/plain" id="figures">{_packed(gzip.compress(figures, mtime=0))}</script>\n'
            f'<script type="text/plain" id="plotly">{_packed((assets / PLOTLY).read_bytes())}</script>\n'
            f"<script>\n{(assets / 'report.js').read_text()}</script>\n"
            "</body>\n</html>\n"
        )

    def write(self, path: Path, title: str, body: str) -> None:
        """Write the page.

        Raises
        ------
        ConfigError : the file cannot be written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.render(title, body), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def heading(title: str, lead: str, tiles: Sequence[tuple[str, str]] = ()) -> str:
    """Return the head of a page: a title, a line about what was done, and numbers as (name, value)."""
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for name, value in tiles
    )
    return (
        f'<h1>{html.escape(title)}</h1>\n<p class="lead">{html.escape(lead)}</p>\n'
        f'<div class="tiles">{cells}</div>\n'
    )


def answer(title: str, sentence: str, facts: Sequence[tuple[str, str]]) -> str:
    """Return the head of a page that answers a question: the answer, and what follows as (question, text)."""
    cells = "".join(
        f'<div class="card"><h3>{html.escape(question)}</h3><p>{html.escape(text)}</p></div>\n'
        for question, text in facts
    )
    return (
        f'<h1>{html.escape(title)}</h1>\n<p class="answer">{html.escape(sentence)}</p>\n'
        f'<div class="grid wide facts">{cells}</div>\n'
    )


def folded(title: str, body: str) -> str:
    """Return a part of a page that a click opens; printed, it is open."""
    return f"<details><summary>{html.escape(title)}</summary>\n{body}</details>\n"


def notes(texts: Sequence[str], kind: Literal["note", "note plain"] = "note") -> str:
    """Return a box with warnings, or one with plain facts; nothing if there are none."""
    if not texts:
        return ""
    return f'<div class="{kind}">' + "".join(f"<p>{html.escape(text)}</p>" for text in texts) + "</div>\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]], *, texts: Sequence[int] = ()) -> str:
    """Return a table; an all-empty header is left out.

    Parameters
    ----------
    texts : columns besides the first that hold text, which starts at the left; numbers end at the right.
        Long texts become several lines.
    """

    def start(column: int, cell: str) -> str:
        if column not in texts:
            return ""
        return ' class="left long"' if len(cell) > _LONG_TEXT else ' class="left"'

    def line(tag: str, cells: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{start(column, cell)}>{html.escape(cell)}</{tag}>" for column, cell in enumerate(cells)
        )

    head = line("th", header)
    lines = "".join(f"<tr>{line('td', row)}</tr>\n" for row in rows)
    named = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f'<div class="card scroll"><table>{named}<tbody>{lines}</tbody></table></div>\n'


def _packed(packed: bytes) -> str:
    return base64.b64encode(packed).decode()
