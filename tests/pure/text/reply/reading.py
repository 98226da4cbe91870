"""Answers read as a server reads them, whole or in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Any

from onbeat.core.tokenizer import Tokenizer
from onbeat.text.reply.calls import (
    CallEnd,
    CallStart,
    CallText,
    ContentText,
    MarkToken,
    ReasoningText,
    ReplyEvent,
)
from onbeat.text.reply.families import FAMILIES, REASONING
from onbeat.text.reply.harmony import new_reader
from onbeat.text.reply.parser import ReplyOptions, ReplyParser, ReplyStyle

TOOLS: dict[str, Any] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "get_time": {"type": "object", "properties": {"zone": {"type": ["string", "null"]}}},
    "refresh": {"type": "object", "properties": {}},
    "mix": {
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "whole": {"type": "integer"},
            "real": {"type": "number"},
            "flag": {"type": "boolean"},
            "nothing": {"type": "null"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "list": {"type": "array"},
            "object": {"type": "object"},
            "kind": {"enum": ["a", "b"]},
            "open": {},
        },
    },
    "far": {
        "allOf": [{"$ref": "#/$defs/Far"}],
        "$defs": {
            "Far": {
                "properties": {
                    "object": {"$ref": "#/$defs/Object"},
                    "twice": {"$ref": "#/$defs/Twice"},
                    "all": {"allOf": [{"$ref": "#/$defs/Object"}]},
                    "maybe": {"anyOf": [{"$ref": "#/$defs/Object"}, {"type": "null"}], "default": None},
                    "missing": {"anyOf": [{"$ref": "#/$defs/Object"}, {"type": "null"}]},
                    "either": {"oneOf": [{"$ref": "#/$defs/Twice"}, {"$ref": "#/$defs/Numbers"}]},
                    "number": {"$ref": "#/$defs/Far/properties/list/items"},
                    "list": {"items": {"type": "integer"}},
                    "kind": {"$ref": "#/$defs/Kind"},
                    "round": {"$ref": "#/$defs/Round"},
                }
            },
            "Object": {"properties": {"a": {"type": "string"}}},
            "Twice": {"$ref": "#/$defs/Object"},
            "Numbers": {"type": "array"},
            "Kind": {"enum": ["5", "b"]},
            "Round": {"anyOf": [{"$ref": "#/$defs/Round"}, {"type": "boolean"}]},
        },
    },
    **{name: {} for name in ("get-weather", "server:tool", "mcp--a--b", "a.b-c", "class", "import")},
}
FAR: dict[str, Any] = {
    **{name: {"a": "b"} for name in ("object", "twice", "all", "maybe")},
    "missing": None,
    "either": [1],
    "number": 5,
    "list": [1, 2],
    "kind": "5",
    "round": True,
}
"""Arguments of `far`, all of whose parameters are known only behind references."""

Pieces = Sequence[str | MarkToken]


@dataclass
class Read:
    """What an answer came to."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @property
    def arguments(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(text)) for name, text in self.calls]


def parser(
    family: str | None = "hermes",
    *,
    reasoning: str | None = "",
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> ReplyParser:
    ids = count()
    style = ReplyStyle(
        None if family is None else FAMILIES[family],
        None if reasoning is None else REASONING[reasoning or ("gemma4" if family == "gemma4" else "think")],
        tokenizer,
    )
    defaults: dict[str, Any] = {"tools": TOOLS, "new_call_id": lambda: f"call_{next(ids)}"}
    return new_reader(style, ReplyOptions(**(defaults | options)))


def events(reader: ReplyParser, pieces: Pieces) -> list[ReplyEvent]:
    """Return the events of pieces, neighbouring texts joined."""
    found: list[ReplyEvent] = []
    for piece in pieces:
        found += reader.push([piece], final=False)
    return merged(found + reader.push([], final=True))


def merged(found: list[ReplyEvent]) -> list[ReplyEvent]:
    result: list[ReplyEvent] = []
    for (kind, index), group in groupby(found, lambda event: (type(event), getattr(event, "index", 0))):
        if kind is CallText:
            result.append(CallText(index, "".join(event.text for event in group)))  # type: ignore[union-attr]
        elif kind in (ContentText, ReasoningText):
            result.append(kind("".join(event.text for event in group)))  # type: ignore[union-attr]
        else:
            result += group
    return result


def read(family: str | None, text: str | Pieces, **options: Any) -> Read:
    """Return what an answer comes to."""
    return read_events(events(parser(family, **options), [text] if isinstance(text, str) else text))


def read_events(found: list[ReplyEvent]) -> Read:
    """Return what events come to, and check their order."""
    result, is_open = Read(), False
    for event in found:
        match event:
            case ReasoningText(text=said):
                result.reasoning += said
            case ContentText(text=said):
                result.content += said
            case CallStart(index=index, name=name):
                assert index == len(result.calls)
                assert not is_open
                is_open = True
                result.calls.append((name, ""))
            case CallText(index=index, text=said):
                assert is_open
                assert index == len(result.calls) - 1
                result.calls[index] = (result.calls[index][0], said)
            case CallEnd():
                assert is_open
                is_open = False
    assert not is_open
    return result
