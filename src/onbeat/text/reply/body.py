"""What readers of call bodies have in common."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from string import ascii_letters, digits

from onbeat.text.reply.calls import Calls

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


Step = Callable[[str, int], int]
"""Takes text from a position on, and returns where it stopped."""


class Body(ABC):
    """Reads the calls between an opening mark and the end of a region, by steps that choose the next one.

    It takes characters one after another, so what it finds does not depend on how the text is split.

    Parameters
    ----------
    calls : where calls go.
    first : the first step.
    """

    def __init__(self, calls: Calls, first: Step) -> None:
        self._calls = calls
        self._num_before = calls.num_begun
        self._raw: list[str] = []
        self._others: list[str] = []
        """What stands between or behind calls as one would, and is none."""
        self._step = first

    @property
    @abstractmethod
    def is_in_text(self) -> bool:
        """Whether it is inside of a text value, where a mark is a part of the text."""

    @abstractmethod
    def take(self, character: str) -> bool:
        """Take the character it stopped at, which begins no mark; return whether it belongs to a call."""

    @property
    def raw(self) -> str:
        """What it has taken and found to belong to no call since the last one."""
        return "\n".join(self._others) * self._has_calls + "".join(self._raw)

    def push(self, text: str, at: int) -> int:
        """Take text from a position on and return where it stopped: at a mark perhaps, or at no call."""
        while at < len(text):
            step, before = self._step, at
            at = step(text, at)
            if at == before and self._step == step:
                break
        return at

    def close(self, *, final: bool) -> None:  # noqa: ARG002 -- as for all
        """End at what is no call, or (`final`) with the answer. A call keeps the arguments that it has."""
        self._calls.end()

    @property
    def _has_calls(self) -> bool:
        return self._calls.num_begun > self._num_before

    def _behind(self, text: str, at: int) -> int:
        """Behind a list of calls: white space."""
        end = end_of_space(text, at)
        if self._others or not self._has_calls:
            self._raw.append(text[at:end])
        return end


def end_of_name(text: str, at: int) -> int:
    """Return where a name of a tool ends that begins at a position, as far as it is there."""
    while at < len(text) and text[at] in NAME_CHARACTERS:
        at += 1
    return at


def refuse(_text: str, at: int) -> int:
    """Stop for good: what has been taken is no call."""
    return at


def is_json(text: str) -> bool:
    """Return whether a text is JSON, and not nested so deep that nobody reads it."""
    try:
        json.loads(text, parse_constant=int)  # which takes neither NaN nor Infinity
    except (ValueError, RecursionError):
        return False
    return True
