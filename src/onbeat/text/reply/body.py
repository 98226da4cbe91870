"""What readers of call bodies have in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from string import ascii_letters, digits
from typing import Protocol

SPACE = " \t\r\n"
"""What separates, and is no part of anything."""

NAME_CHARACTERS = frozenset(ascii_letters + digits + "_.:-")
"""Of names of tools."""


def to_json(value: object) -> str:
    """Return JSON as UTF-8 can hold it: half a surrogate pair, which models may write, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or is_unicode(text) else json.dumps(value, allow_nan=False)


def is_unicode(text: str) -> bool:
    """Return whether a text holds no half of a surrogate pair."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def end_of_space(text: str, at: int) -> int:
    """Return where the white space ends that begins at a position, if any does."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


class Body(Protocol):
    """Reads the calls between an opening mark and the end of a region.

    It takes characters one after another, so what it finds does not depend on how the text is split.
    """

    @property
    def is_in_text(self) -> bool:
        """Whether it is inside of a text value, where a mark is a part of the text."""
        ...

    @property
    def raw(self) -> str:
        """What it has taken since the last call and found to belong to none."""
        ...

    def push(self, text: str, at: int) -> int:
        """Take text from a position on and return where it stopped: at a mark perhaps, or at no call."""
        ...

    def take(self, character: str) -> bool:
        """Take the character it stopped at, which begins no mark; return whether it belongs to a call."""
        ...

    def close(self, *, final: bool) -> None:
        """End at what is no call, or (`final`) with the answer. A call keeps the arguments that it has."""
        ...


Step = Callable[[str, int], int]
"""Takes text from a position on, and returns where it stopped."""


def run_steps(current: Callable[[], Step], text: str, at: int) -> int:
    """Run the steps of a reader, which choose the one that follows, until all is taken or one stops."""
    while at < len(text):
        step, before = current(), at
        at = step(text, at)
        if at == before and current() == step:
            break
    return at


def refuse(_text: str, at: int) -> int:
    """Stop for good: what has been taken is no call."""
    return at
