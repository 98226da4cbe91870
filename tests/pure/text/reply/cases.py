"""Answers of every family, and what they come to. Forms are those of the families' own chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

MIX = (
    '{"text": "hi", "whole": 42, "real": 3.14, "flag": true, "nothing": null, "maybe": null, '
    '"list": ["a", [1, {}]], "object": {"deep": {"er": []}}, "kind": "b", "open": "{x} [y]"}'
)
ESCAPES = r'{"text": "He said \"}]\" in C:\\dir\\", "open": "line\nnext \u00e9 \ud83c\udf89 🎉"}'


class Case(NamedTuple):
    """An answer, and what it comes to."""

    name: str
    family: str
    text: str
    calls: list[tuple[str, Any]] = []  # noqa: RUF012 -- never changed
    content: str = ""
    reasoning: str = ""
    raw: list[str] | None = None
    """The arguments to the letter, where they are not JSON."""
    opens: bool = False
    """Whether the prompt ends inside of reasoning."""

    def __str__(self) -> str:
        return f"{self.family}: {self.name}"


Call = tuple[str, str]
"""A name, and arguments as JSON."""


def object_of(call: Call, key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def array_of(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(map(object_of, calls)) + "]"


def _xml(call: Call) -> str:
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in json.loads(call[1]).items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call[0]}>\n{parameters}</function>\n</tool_call>"


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in json.loads(call[1]).items())})"


def _braces(value: Any) -> str:
    """Return a value as Gemma's templates write it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_braces(each)}" for key, each in value.items()) + "}"
    return f"[{','.join(map(_braces, value))}]" if isinstance(value, list) else json.dumps(value)


FORMS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{object_of(call)}\n</tool_call>" for call in calls),
    "qwen3-xml": lambda calls: "\n".join(map(_xml, calls)),
    "llama3-json": lambda calls: (
        "<|python_tag|>" + "; ".join(object_of(call, "parameters") for call in calls)
    ),
    "pythonic": lambda calls: f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>",
    "mistral": lambda calls: f"[TOOL_CALLS] {array_of(calls)}",
    "mistral-args": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls),
    "gemma4": lambda calls: "".join(
        f"<|tool_call>call:{name}{_braces(json.loads(args))}<tool_call|>" for name, args in calls
    ),
    "phi": lambda calls: f"functools{array_of(calls)}",
    "granite": lambda calls: f"<|tool_call|> {array_of(calls)}",
    "json": lambda calls: f"```json\n{array_of(calls)}\n```",
}
"""How a family writes calls."""

PARIS, NOON, NOTHING = ("get_weather", '{"city": "Paris"}'), ("get_time", '{"zone": null}'), ("refresh", "{}")


def calls_of(*calls: Call) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


REASONS = {"gemma4": ("<|channel>thought\n", "<channel|>")}
"""What stands around a family's reasoning, where it is not `<think>`."""


def _common(family: str) -> list[Case]:
    """What every family must do."""
    form = FORMS[family]
    thinks, answers = REASONS.get(family, ("<think>", "</think>"))
    one = form([PARIS])
    unknown = form([("drop_tables", "{}")])
    return [
        Case("no call", family, " It is {sunny} in [Paris], 5 < 6. \n\n"),
        Case("one call", family, one, calls_of(PARIS)),
        Case("two calls", family, form([PARIS, NOON]), calls_of(PARIS, NOON)),
        Case("every type", family, form([("mix", MIX)]), calls_of(("mix", MIX))),
        Case("no arguments", family, form([NOTHING]), calls_of(NOTHING)),
        Case("escapes", family, form([("mix", ESCAPES)]), calls_of(("mix", ESCAPES))),
        Case("text before", family, f"I look.\n\n{one}", calls_of(PARIS), "I look."),
        Case("text behind", family, f"{one}\nDone {{so}}.\n", calls_of(PARIS), "Done {so}.\n"),
        Case("text around", family, f"I look.\n\n{one} Done.", calls_of(PARIS), "I look.\nDone."),
        Case("an unknown tool", family, f"So: {unknown}", content=f"So: {unknown}"),
        Case("an unknown tool, then a known one", family, f"{unknown}\n{one}", calls_of(PARIS), unknown),
        Case("an unfinished mark", family, one[:4], content=one[:4]),
        Case(
            "behind reasoning", family, f"{thinks}\nHm.\n{answers}\n\n{one}", calls_of(PARIS), reasoning="Hm."
        ),
        Case("in reasoning", family, f"Hm.\n{one}", calls_of(PARIS), reasoning="Hm.", opens=True),
        Case(
            "about calls, in reasoning",
            family,
            f"Not {unknown} so{answers}A",
            content="A",
            reasoning=f"Not {unknown} so",
            opens=True,
        ),
    ]


_JSON = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "mistral": ("[TOOL_CALLS]", ""),
    "phi": ("functools", ""),
    "granite": ("<|tool_call|>", ""),
    "llama3-json": ("<|python_tag|>", ""),
    "json": ("```json\n", "```"),
}
"""What stands around the JSON of the families that write such."""


def _json(family: str) -> list[Case]:
    """What every family must do whose calls are JSON objects."""
    before, behind = _JSON[family]

    def case(name: str, text: str, calls: Sequence[Call] = (), **fields: Any) -> Case:
        return Case(name, family, before + text + behind, calls_of(*calls), **fields)

    def text(name: str, inside: str) -> Case:
        return case(name, inside, content=before + inside + behind)

    cut = before + '{"name": "get_weather", "arguments": {"city": "Pa'
    return [
        case("one object", object_of(PARIS), [PARIS]),
        case("one object in an array", array_of([PARIS]), [PARIS]),
        case("parameters", object_of(PARIS, "parameters"), [PARIS]),
        case("name behind", '{"arguments": {"city": "Paris"}, "name": "get_weather"}', [PARIS]),
        case(
            "name behind, and in the arguments",
            '{"arguments": {"open": {"name": "x"}}, "name": "mix"}',
            [("mix", '{"open": {"name": "x"}}')],
        ),
        case(
            "other keys",
            f'{{"id": 1, "type": "function", "x": [{{}}, "}}"], {object_of(PARIS)[1:-1]}, "y": 2}}',
            [PARIS],
        ),
        case("white space", ' \n{ "name" : "get_weather" ,\n "arguments" : {"city": "Paris"} } \n', [PARIS]),
        case("escaped names", r'{"na\u006de": "get_w\u0065ather", "arguments": {"city": "Paris"}}', [PARIS]),
        case("arguments as text", r'{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}', [PARIS]),
        case("null arguments", '{"name": "refresh", "arguments": null}', [NOTHING]),
        case("text for arguments", '{"name": "refresh", "arguments": "now"}', [("refresh", '"now"')]),
        case("a number for arguments", '{"arguments": 4.5e1, "name": "refresh"}', [("refresh", "45.0")]),
        case("apart by semicolons", f"{object_of(PARIS)} ;{object_of(NOON)}", [PARIS, NOON]),
        case("apart by nothing", f"{object_of(PARIS)}{object_of(NOON)}", [PARIS, NOON]),
        case(
            "a mark in an argument",
            object_of(("mix", '{"text": "</tool_call><tool_call>[TOOL_CALLS]```"}')),
            [("mix", '{"text": "</tool_call><tool_call>[TOOL_CALLS]```"}')],
        ),
        case(
            "deep",
            object_of(("mix", '{"open": ' + '[{"a": ' * 9 + "1" + "}]" * 9 + "}")),
            [("mix", '{"open": ' + '[{"a": ' * 9 + "1" + "}]" * 9 + "}")],
        ),
        text("no JSON", "{name: get_weather}"),
        text("no name", '{"arguments": {"city": "Paris"}}'),
        text("a number for a name", '{"name": 5, "arguments": {}}'),
        text("only text", " is a word."),
        text("an empty array", "[] "),
        Case("cut off in the arguments", family, cut, raw=['{"city": "Pa'], calls=[("get_weather", None)]),
        Case(
            "cut off in the name", family, before + '{"name": "get_wea', content=before + '{"name": "get_wea'
        ),
        Case(
            "cut off before the name",
            family,
            before + '{"arguments": {"city": "P',
            content=before + '{"arguments": {"city": "P',
        ),
        Case(
            "wrong inside of arguments",
            family,
            before + '{"name": "mix", "arguments": {"open": tru, \'x\': <b>}}' + behind,
            [("mix", None)],
            raw=["{\"open\": tru, 'x': <b>}"],
        ),
        case("a brace too many", object_of(PARIS) + "}", [PARIS]),
        Case(
            "an unknown one of three",
            family,
            before + ", ".join(map(object_of, (PARIS, ("nobody", '{"a": {}}'), NOON))) + behind,
            calls_of(PARIS, NOON),
            object_of(("nobody", '{"a": {}}')),
        ),
        Case(
            "an unknown one of two",
            family,
            before + f"{object_of(PARIS)}, {object_of(('nobody', '{}'))}" + behind,
            calls_of(PARIS),
            object_of(("nobody", "{}")),
        ),
    ]


COMMON = [case for family in FORMS for case in _common(family)]
COMMON += [case for family in _JSON for case in _json(family)]


def _braces_text(name: str, text: str) -> Case:
    return Case(name, "gemma4", text, content=text)


_QUOTED = '<|"|>Paris<|"|>'
BRACES = [
    Case(
        "reasoning, then an answer",
        "gemma4",
        "<|channel>thought\nHm, <b>.\n<channel|>It is 4.\n",
        content="It is 4.\n",
        reasoning="Hm, <b>.",
    ),
    Case(
        "reasoning without its label",
        "gemma4",
        "<|channel>thou Hm.<channel|>4",
        content="4",
        reasoning="thou Hm.",
    ),
    Case("empty reasoning", "gemma4", "<|channel>thought\n<channel|>4", content="4"),
    Case("reasoning of its label alone", "gemma4", "<|channel>thought<channel|>4", content="4"),
    Case("cut off in its label", "gemma4", "<|channel>though"),
    Case(
        "a call ends reasoning",
        "gemma4",
        f"<|channel>thought\nHm.\n{FORMS['gemma4']([PARIS])}So.",
        calls_of(PARIS),
        "So.",
        reasoning="Hm.",
    ),
    Case(
        "quotes, brackets and marks in a text",
        "gemma4",
        '<|tool_call>call:mix{text:<|"|>a "b" {c: [1, <d>]} <|" <tool_call|> \\n\n<|"|>,whole:1}<tool_call|>',
        [("mix", {"text": 'a "b" {c: [1, <d>]} <|" <tool_call|> \\n\n', "whole": 1})],
    ),
    Case(
        "quoted keys, white space, words of other languages",
        "gemma4",
        "<|tool_call>call:mix { }<tool_call|>"
        '<|tool_call>call:mix{<|"|>a b<|"|>: True, "list": [ None, -1.5e3, x y, '
        "12:30 , a<b ],\n object :{}, nothing:,maybe: null,real}<tool_call|>",
        [
            (
                "mix",
                {
                    "a b": True,
                    "list": [None, -1500.0, "x y", "12:30", "a<b"],
                    "object": {},
                    "nothing": None,
                    "maybe": None,
                    "real": None,
                },
            )
        ],
        "<|tool_call>call:mix { }<tool_call|>",
    ),
    Case("no prefix", "gemma4", f"<|tool_call>:get_weather{{city:{_QUOTED}}}<tool_call|>", calls_of(PARIS)),
    Case("a name alone", "gemma4", f"<|tool_call>get_weather{{city:{_QUOTED}}}<tool_call|>", calls_of(PARIS)),
    Case(
        "two in a region",
        "gemma4",
        "<|tool_call>call:refresh{}\ncall:refresh{}<tool_call|>",
        calls_of(NOTHING, NOTHING),
    ),
    Case(
        "braces that are not closed",
        "gemma4",
        "<|tool_call>call:mix{object:{a:[1,tru<tool_call|>So.",
        [("mix", {"object": {"a": [1, "tru"]}})],
        "So.",
    ),
    Case(
        "cut off in a text",
        "gemma4",
        '<|tool_call>call:mix{whole:5,text:<|"|>a\nb<|',
        [("mix", None)],
        raw=[r'{"whole": 5, "text": "a\nb'],
    ),
    _braces_text("no name", "<|tool_call>{a:1}<tool_call|>"),
    _braces_text("no braces", "<|tool_call>call:mix(a=1)<tool_call|>"),
    _braces_text("only text", "<|tool_call> is a word."),
]
"""What Gemma 4 alone may answer."""
