"""Finding marks such as `<tool_call>` in text that comes in pieces."""

from __future__ import annotations

import re
from collections.abc import Collection


class MarkScanner:
    """Finds the first of several marks, and never decides what a longer piece could decide otherwise.

    Parameters
    ----------
    marks : texts; of two that begin at one place the longer counts.
    """

    def __init__(self, marks: Collection[str]) -> None:
        self._marks = sorted(marks, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        self._longest = max(map(len, self._marks), default=0)

    def split(self, text: str, *, final: bool) -> tuple[str, str, str]:
        """Return the text before the first mark, the mark, and what is behind it.

        Without a mark it is empty, and the last is the end of the text that may yet become one.

        Parameters
        ----------
        final : whether no more text comes.
        """
        found = self._pattern.search(text)
        end = len(text) if found is None else found.start() + 1
        for start in range(max(len(text) - self._longest + 1, 0), 0 if final else end):
            if self._may_become_mark(text[start:]):
                return text[:start], "", text[start:]
        if found is None:
            return text, "", ""
        return text[: found.start()], found.group(), text[found.end() :]

    def at(self, text: str, position: int, *, final: bool) -> str | None:
        """Return the mark at a position of a text, "" if there is none, None if only more text tells."""
        if not final and self._may_become_mark(text[position : position + self._longest]):
            return None
        found = self._pattern.match(text, position)
        return "" if found is None else found.group()

    def _may_become_mark(self, end: str) -> bool:
        return any(len(mark) > len(end) and mark.startswith(end) for mark in self._marks)
