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

    @property
    def label(self) -> str:
        return f"{self.family}: {self.name}"


Call = tuple[str, str]
"""A name, and arguments as JSON."""


def _object(call: Call, key: str = "arguments") -> str:
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def _array(calls: Sequence[Call]) -> str:
    return "[" + ", ".join(map(_object, calls)) + "]"


def _xml(call: Call) -> str:
    values = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in json.loads(call[1]).items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={call[0]}>\n{parameters}</function>\n</tool_call>"


def _python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in json.loads(call[1]).items())})"


FORMS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": lambda calls: "\n".join(f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls),
    "qwen3-xml": lambda calls: "\n".join(map(_xml, calls)),
    "llama3-json": lambda calls: "<|python_tag|>" + "; ".join(_object(call, "parameters") for call in calls),
    "pythonic": lambda calls: f"<|python_start|>[{', '.join(map(_python, calls))}]<|python_end|>",
    "mistral": lambda calls: f"[TOOL_CALLS] {_array(calls)}",
    "mistral-args": lambda calls: "".join(f"[TOOL_CALLS]{name}[ARGS]{args}" for name, args in calls),
    "phi": lambda calls: f"functools{_array(calls)}",
    "granite": lambda calls: f"<|tool_call|> {_array(calls)}",
    "json": lambda calls: f"```json\n{_array(calls)}\n```",
}
"""How a family writes calls."""

_PARIS, _NOON, _NONE = ("get_weather", '{"city": "Paris"}'), ("get_time", '{"zone": null}'), ("refresh", "{}")


def _calls(*calls: Call) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def _common(family: str) -> list[Case]:
    """What every family must do."""
    form = FORMS[family]
    one = form([_PARIS])
    unknown = form([("drop_tables", "{}")])
    return [
        Case("no call", family, " It is {sunny} in [Paris], 5 < 6. \n\n"),
        Case("one call", family, one, _calls(_PARIS)),
        Case("two calls", family, form([_PARIS, _NOON]), _calls(_PARIS, _NOON)),
        Case("every type", family, form([("mix", MIX)]), _calls(("mix", MIX))),
        Case("no arguments", family, form([_NONE]), _calls(_NONE)),
        Case("escapes", family, form([("mix", ESCAPES)]), _calls(("mix", ESCAPES))),
        Case("text before", family, f"I look.\n\n{one}", _calls(_PARIS), "I look."),
        Case("text behind", family, f"{one}\nDone {{so}}.\n", _calls(_PARIS), "Done {so}.\n"),
        Case("an unknown tool", family, f"So: {unknown}", content=f"So: {unknown}"),
        Case("an unknown tool, then a known one", family, f"{unknown}\n{one}", _calls(_PARIS), unknown),
        Case("an unfinished mark", family, one[:4], content=one[:4]),
        Case("behind reasoning", family, f"<think>\nHm.\n</think>\n\n{one}", _calls(_PARIS), reasoning="Hm."),
        Case("in reasoning", family, f"Hm.\n{one}", _calls(_PARIS), reasoning="Hm.", opens=True),
        Case(
            "about calls, in reasoning",
            family,
            f"Not {unknown} so</think>A",
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
        return Case(name, family, before + text + behind, _calls(*calls), **fields)

    def text(name: str, inside: str) -> Case:
        return case(name, inside, content=before + inside + behind)

    cut = before + '{"name": "get_weather", "arguments": {"city": "Pa'
    return [
        case("one object", _object(_PARIS), [_PARIS]),
        case("one object in an array", _array([_PARIS]), [_PARIS]),
        case("parameters", _object(_PARIS, "parameters"), [_PARIS]),
        case("name behind", '{"arguments": {"city": "Paris"}, "name": "get_weather"}', [_PARIS]),
        case(
            "name behind, and in the arguments",
            '{"arguments": {"open": {"name": "x"}}, "name": "mix"}',
            [("mix", '{"open": {"name": "x"}}')],
        ),
        case(
            "other keys",
            f'{{"id": 1, "type": "function", "x": [{{}}, "}}"], {_object(_PARIS)[1:-1]}, "y": 2}}',
            [_PARIS],
        ),
        case("white space", ' \n{ "name" : "get_weather" ,\n "arguments" : {"city": "Paris"} } \n', [_PARIS]),
        case("escaped names", r'{"na\u006de": "get_w\u0065ather", "arguments": {"city": "Paris"}}', [_PARIS]),
        case("arguments as text", r'{"name": "get_weather", "arguments": "{\"city\": \"Paris\"}"}', [_PARIS]),
        case("null arguments", '{"name": "refresh", "arguments": null}', [_NONE]),
        case("text for arguments", '{"name": "refresh", "arguments": "now"}', [("refresh", '"now"')]),
        case("a number for arguments", '{"arguments": 4.5e1, "name": "refresh"}', [("refresh", "45.0")]),
        case("apart by semicolons", f"{_object(_PARIS)} ;{_object(_NOON)}", [_PARIS, _NOON]),
        case("apart by nothing", f"{_object(_PARIS)}{_object(_NOON)}", [_PARIS, _NOON]),
        case(
            "a mark in an argument",
            _object(("mix", '{"text": "</tool_call><tool_call>[TOOL_CALLS]```"}')),
            [("mix", '{"text": "</tool_call><tool_call>[TOOL_CALLS]```"}')],
        ),
        case(
            "deep",
            _object(("mix", '{"open": ' + '[{"a": ' * 9 + "1" + "}]" * 9 + "}")),
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
        Case("a brace too many", family, before + _object(_PARIS) + "}" + behind, _calls(_PARIS), "}"),
        Case(
            "an unknown one of two",
            family,
            before + f"{_object(_PARIS)}, {_object(('nobody', '{}'))}" + behind,
            _calls(_PARIS),
            _object(("nobody", "{}")),
        ),
    ]


CASES = [case for family in FORMS for case in _common(family)]
CASES += [case for family in _JSON for case in _json(family)]


def _text(family: str, name: str, text: str) -> Case:
    return Case(name, family, text, content=text)


_PARAMETER = "<parameter=text>"
CASES += [
    # tags
    Case(
        "values by their schemas",
        "qwen3-xml",
        "<tool_call><function=mix><parameter=text>42</parameter><parameter=whole>42</parameter>"
        "<parameter=real>x</parameter><parameter=flag>True</parameter><parameter=maybe>null</parameter>"
        "<parameter=list>[1, NaN]</parameter><parameter=kind>true</parameter><parameter=unknown>7</parameter>"
        "<parameter=nothing>None</parameter></function></tool_call>",
        [
            (
                "mix",
                {
                    "text": "42",
                    "whole": 42,
                    "real": "x",
                    "flag": True,
                    "maybe": None,
                    "list": "[1, NaN]",
                    "kind": "true",
                    "unknown": "7",
                    "nothing": None,
                },
            )
        ],
    ),
    Case(
        "marks in a value",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}\n\n</tool_call> <function= </param </</parameter>"
        "</function></tool_call>",
        [("mix", {"text": "\n</tool_call> <function= </param </"})],
    ),
    Case(
        "a parameter that is not closed",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}a\n<parameter=whole>1\n</function></tool_call>",
        [("mix", {"text": "a", "whole": 1})],
    ),
    Case(
        "a function that is not closed",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}a</parameter></tool_call>\nSo.",
        [("mix", {"text": "a"})],
        "So.",
    ),
    Case(
        "a region that is not closed",
        "qwen3-xml",
        "<tool_call><function=refresh></function><tool_call><function=refresh></function></tool_call>",
        [("refresh", {}), ("refresh", {})],
    ),
    Case(
        "two functions in a region",
        "qwen3-xml",
        "<tool_call><function=refresh></function>\n<function=refresh></function></tool_call>",
        [("refresh", {}), ("refresh", {})],
    ),
    Case(
        "cut off",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}a</parameter><parameter=whole>1",
        [("mix", None)],
        raw=['{"text": "a"'],
    ),
    _text("qwen3-xml", "no tag", "<tool_call>{}</tool_call>"),
    _text("qwen3-xml", "no function", "<tool_call><function=></function></tool_call>"),
    _text("qwen3-xml", "a parameter alone", f"<tool_call>{_PARAMETER}a</parameter></tool_call>"),
    _text("qwen3-xml", "an end alone", "<tool_call></function></tool_call>"),
    _text("qwen3-xml", "an unfinished tag", "<tool_call><functor=mix></tool_call>"),
    # Python
    Case("bare", "pythonic", "[get_weather(city='Paris')]", _calls(_PARIS)),
    Case("bare, behind white space", "pythonic", "\n [ refresh( ) , refresh()] ", _calls(_NONE, _NONE)),
    Case(
        "literals",
        "pythonic",
        '[mix(text=\'it\\\'s [(\', open="\\"q\\" )", whole=-1, real=-1.5, flag=True, nothing=None, '
        "list=(1, [2]), object={'a': {'b': false}}, maybe=null)]",
        [
            (
                "mix",
                {
                    "text": "it's [(",
                    "open": '"q" )',
                    "whole": -1,
                    "real": -1.5,
                    "flag": True,
                    "nothing": None,
                    "list": [1, [2]],
                    "object": {"a": {"b": False}},
                    "maybe": None,
                },
            )
        ],
    ),
    Case(
        "cut off in the second",
        "pythonic",
        "[refresh(), get_weather(city='P",
        _calls(_NONE),
        "get_weather(city='P",
    ),
    Case(
        "wrong in the second",
        "pythonic",
        "[refresh(), get_weather(city=b'x')]",
        _calls(_NONE),
        "get_weather(city=b'x')]",
    ),
    _text("pythonic", "a reference", "[1] See there."),
    _text("pythonic", "a number without end", "[mix(real=1e999)]"),
    _text("pythonic", "no name of an argument", "[get_weather('Paris')]"),
    _text("pythonic", "a product", "[mix(text='a' * 9)]"),
    _text("pythonic", "more arguments", "[mix(**x)]"),
    _text("pythonic", "no list", "<|python_start|>get_weather(city='Paris')<|python_end|>"),
    _text("pythonic", "brackets that do not match", "[mix(list=[1)]"),
    _text("pythonic", "cut off", "[get_weather(city='Pa"),
    # a name, then arguments
    Case("without a mark inside", "mistral-args", '[TOOL_CALLS]get_weather{"city": "Paris"}', _calls(_PARIS)),
    Case(
        "with an id",
        "mistral-args",
        '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}',
        _calls(_PARIS),
    ),
    Case(
        "white space", "mistral-args", '[TOOL_CALLS] get_weather [ARGS] {"city": "Paris"}\n', _calls(_PARIS)
    ),
    Case(
        "cut off",
        "mistral-args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "P',
        [("get_weather", None)],
        raw=['{"city": "P'],
    ),
    _text("mistral-args", "no arguments", "[TOOL_CALLS]get_weather"),
    _text("mistral-args", "no object", "[TOOL_CALLS]get_weather[ARGS][1]"),
    _text("mistral-args", "another mark", "[TOOL_CALLS]get_weather[ARGUMENTS]{}"),
    _text("mistral-args", "no name", "[TOOL_CALLS]{}"),
    _text("mistral-args", "a sentence", "[TOOL_CALLS] is a mark."),
    # without a mark
    *(
        case
        for family in ("llama3-json", "json")
        for case in (
            Case("bare", family, f"\n{_object(_PARIS)}\n", _calls(_PARIS)),
            Case(
                "bare, with text behind",
                family,
                f"{_object(_PARIS)} I called {{it}}.",
                _calls(_PARIS),
                "I called {it}.",
            ),
            Case(
                "bare, with other JSON behind",
                family,
                f'{_object(_PARIS)} {{"a": 1}}',
                _calls(_PARIS),
                '{"a": 1}',
            ),
            _text(family, "JSON that is an answer", '{"name": "Ann", "age": 30}'),
            _text(family, "a name without arguments", '{"name": "refresh"}'),
            _text(family, "cut off", '{"name": "refresh", "arg'),
            _text(family, "JSON behind text", f"Here: {_object(_PARIS)}"),
        )
    ),
    Case("a bare array", "json", _array([_PARIS, _NOON]), _calls(_PARIS, _NOON)),
    _text("json", "other code", "```python\nprint({})\n```\n"),
    # other marks of a family
    Case("a mark that closes", "phi", f"<|tool_call|>{_array([_PARIS])}<|/tool_call|>", _calls(_PARIS)),
    Case("the older mark", "granite", f"<tool_call>{_array([_PARIS])}</tool_call>", _calls(_PARIS)),
    Case(
        "text where a mark is due",
        "hermes",
        f"<tool_call>{_object(_PARIS)} so</tool_call> it is",
        _calls(_PARIS),
        "so it is",
    ),
    Case(
        "a mark where arguments are due",
        "hermes",
        '<tool_call>{"name": "mix", "arguments": {"a": </tool_call>So.',
        [("mix", None)],
        "So.",
        raw=['{"a": '],
    ),
    Case(
        "no mark that closes",
        "hermes",
        f"<tool_call>{_object(_PARIS)}<tool_call>{_object(_NOON)}",
        _calls(_PARIS, _NOON),
    ),
    _text("hermes", "a mark alone", "</tool_call> ends what <tool_call> begins."),
]
