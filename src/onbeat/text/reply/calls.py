"""The calls of one answer, as body readers find them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentText:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of a tool begins; its arguments follow."""

    index: int
    """Of the calls of this answer, from 0."""
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallText:
    """More of a call's arguments, which together are JSON."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The arguments of a call are complete."""

    index: int


ReplyEvent = ReasoningText | ContentText | CallStart | CallText | CallEnd


@dataclass(frozen=True, slots=True)
class MarkToken:
    """A special token that stands between two pieces of text, such as `[TOOL_CALLS]`."""

    text: str


Tools = Mapping[str, Any]
"""The JSON schema of each offered tool's arguments, by its name."""


class Calls:
    """Numbers the calls of an answer and writes their events.

    Parameters
    ----------
    tools : what may be called.
    new_call_id : makes an id for each call.
    is_single : whether the answer is complete with its first call.
    """

    def __init__(self, tools: Tools, new_call_id: Callable[[], str], *, is_single: bool = False) -> None:
        self.tools = tools
        self._new_call_id = new_call_id
        self._is_single = is_single
        self.events: list[ReplyEvent] = []
        """Those that nobody has taken yet."""
        self.num_begun = 0
        self.is_open = False
        """Whether the arguments of a call are being read."""

    @property
    def is_complete(self) -> bool:
        """Whether the only call that is wanted is over."""
        return self._is_single and self.num_begun > 0 and not self.is_open

    def start(self, name: str) -> None:
        if not self.is_complete:
            self.events.append(CallStart(self.num_begun, self._new_call_id(), name))
            self.num_begun += 1
            self.is_open = True

    def add(self, text: str) -> None:
        if self.is_open and text:
            self.events.append(CallText(self.num_begun - 1, text))

    def end(self) -> None:
        if self.is_open:
            self.events.append(CallEnd(self.num_begun - 1))
            self.is_open = False

    def whole(self, name: str, arguments: str) -> None:
        """Add a call that is complete."""
        self.start(name)
        self.add(arguments)
        self.end()
