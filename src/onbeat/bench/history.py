"""What was asked of a server and what came, event by event, and what a history proves to be wrong.

A request's known answer is what the server said to it at temperature 0, before anything was disturbed. From
then on every answer must be that text: each token once, in order, one end, and a count that agrees.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

_ENOUGH = 12
"""Characters that stand in one place of a text alone."""


class End(StrEnum):
    """How an answer ended, as its client saw it."""

    WHOLE = "whole"
    """With a finish reason, and `[DONE]` where it was streamed."""
    REFUSED = "refused"
    """No answer was begun: a status other than 200."""
    FAILED = "failed"
    """An error event or object, after any text."""
    CUT = "cut"
    """The connection ended, or the stream without a finish reason."""
    CANCELLED = "cancelled"
    """By the client."""


@dataclass(frozen=True, slots=True)
class KnownAnswer:
    """What a prompt is answered with."""

    prompt: str
    text: str
    num_tokens: int
    finish_reason: str


@dataclass(slots=True)
class ObservedAnswer:
    """One request and everything that came for it."""

    number: int
    known: int
    """Place of its known answer."""
    streamed: bool
    begun: float
    """Seconds since the run began; likewise the end."""
    ended: float = 0.0
    end: End = End.CUT
    detail: str = ""
    """Why there was no whole answer."""
    pieces: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    usages: list[int] = field(default_factory=list)
    """Output tokens, as often as they were told."""
    num_done: int = 0
    """`[DONE]` events."""
    late_events: int = 0
    """Events behind `[DONE]`, and text behind a finish reason."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that no client may see."""

    exchange: int
    what: str


def violations(exchanges: Iterable[ObservedAnswer], known: Sequence[KnownAnswer]) -> list[Violation]:
    """Return what is wrong in a history; an honest refusal or failure is not."""
    found = []
    for each in exchanges:
        found += [Violation(each.number, what) for what in _faults(each, known[each.known])]
    return found


def _faults(exchange: ObservedAnswer, known: KnownAnswer) -> Iterable[str]:
    text = "".join(exchange.pieces)
    if exchange.late_events:
        yield f"{exchange.late_events} events came behind the end"
    if not known.text.startswith(text):
        yield f"the text is another: {_difference(text, known.text)}"
    if exchange.end is not End.WHOLE:
        return
    if text != known.text and known.text.startswith(text):
        yield f"a whole answer lacks its last {len(known.text) - len(text)} of {len(known.text)} characters"
    if exchange.finish_reasons != [known.finish_reason]:
        yield f"finish reasons {exchange.finish_reasons}, not one {known.finish_reason!r}"
    if exchange.usages != [known.num_tokens]:
        yield f"usage told {exchange.usages} output tokens, not once {known.num_tokens}"
    if exchange.streamed and exchange.num_done != 1:
        yield f"[DONE] came {exchange.num_done} times"


def _difference(text: str, known: str) -> str:
    """Say where two texts part, and how it looks."""
    place = next(
        (i for i, (a, b) in enumerate(zip(text, known, strict=False)) if a != b), min(len(text), len(known))
    )
    came, expected = text[place:], known[place:]
    kind = "changed"
    if expected and expected[:_ENOUGH] in came:
        kind = "doubled"
    elif came and came[:_ENOUGH] in expected:
        kind = "lost"
    return f"{kind} from character {place} on: {came[:24]!r} came, {expected[:24]!r} was due"


def counts(exchanges: Iterable[ObservedAnswer]) -> Counter[str]:
    """Return how many ended in which way."""
    return Counter(each.end.value for each in exchanges)


def save(path: Path, exchanges: Iterable[ObservedAnswer], known: Sequence[KnownAnswer]) -> None:
    """Write a history as JSON Lines: the known answers, then what was exchanged."""
    with path.open("w", encoding="utf-8") as file:
        for answer in known:
            file.write(json.dumps({"known": asdict(answer)}, ensure_ascii=False) + "\n")
        for exchange in exchanges:
            file.write(json.dumps({"exchange": asdict(exchange)}, ensure_ascii=False) + "\n")
