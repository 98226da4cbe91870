"""The parts of an answer, as they come: what every API writes, each in its own form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


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


class ReplyReader(Protocol):
    """Turns the text of one choice into events, however it is split."""

    @property
    def mark_token_ids(self) -> frozenset[int]:
        """Special tokens that it is to be told of, though they are no text."""
        ...

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens so far that were reasoning, its marks included."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether nothing more is wanted, so that the answer ends here."""
        ...

    def push(self, pieces: Sequence[str | MarkToken], *, final: bool) -> list[ReplyEvent]:
        """Take what one token adds, which may be nothing, and return what is certain by now.

        Parameters
        ----------
        pieces : text and special tokens, in their order.
        final : whether the answer ends here, so that nothing is held back any longer.
        """
        ...
