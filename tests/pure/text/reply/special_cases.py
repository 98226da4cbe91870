"""Answers that only one or two families may give, and what they come to."""

from __future__ import annotations

import json

from tests.pure.text.reply.cases import (
    BRACES,
    COMMON,
    NOON,
    NOTHING,
    PARIS,
    Case,
    array_of,
    calls_of,
    object_of,
)
from tests.pure.text.reply.reading import FAR


def _text(family: str, name: str, text: str) -> Case:
    return Case(name, family, text, content=text)


_THOUGHT = "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant"
_TO = "<|channel|>commentary to=functions."
_PARAMETER = "<parameter=text>"
SPECIAL = [
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
    Case(
        "values behind references",
        "qwen3-xml",
        "<tool_call><function=far>"
        + "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
            for key, value in FAR.items()
        )
        + "</function></tool_call>",
        [("far", FAR)],
    ),
    Case(
        "no opening mark",
        "qwen3-xml",
        f"So:\n<function=mix>\n{_PARAMETER}\na\n</parameter>\n</function>\n</tool_call>\n"
        "<function=refresh>\n</function>",
        [("mix", {"text": "a"}), ("refresh", {})],
        "So:",
    ),
    _text("qwen3-xml", "a function by name", "Use <function=refresh> or <function=mix>; <function=x y>."),
    _text("qwen3-xml", "no opening mark, an unknown tool", "<function=nobody>\n</function>\n</tool_call>"),
    Case(
        "an empty value that is no text",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}\n\n</parameter><parameter=whole>\n</parameter>"
        "<parameter=nothing></parameter></function></tool_call>",
        [("mix", {"text": "", "nothing": None})],
    ),
    Case(
        "closing tags in a value",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}a</parameter>b </parameter>\n</par</parameter>\n"
        '<parameter=object>{"a": "</parameter></function></tool_call>"}</parameter></function></tool_call>',
        [
            (
                "mix",
                {
                    "text": "a</parameter>b </parameter>\n</par",
                    "object": {"a": "</parameter></function></tool_call>"},
                },
            )
        ],
    ),
    Case(
        "a text that is not closed in an object",
        "qwen3-xml",
        '<tool_call><function=mix><parameter=object>\n{"a": "b}\n</parameter>\n</function></tool_call>',
        [("mix", {"object": '{"a": "b}'})],
    ),
    Case(
        "text behind a parameter, and no more tags",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}\na\n</parameter>\nI called it.",
        [("mix", {"text": "a"})],
        "I called it.",
    ),
    Case(
        "a parameter twice",
        "qwen3-xml",
        f"<tool_call><function=mix>{_PARAMETER}a</parameter>{_PARAMETER}b</parameter></function></tool_call>",
        [("mix", None)],
        raw=['{"text": "a"}'],
    ),
    Case(
        "an unknown function behind one that is not closed",
        "qwen3-xml",
        "<tool_call><function=refresh><function=nobody></tool_call>",
        [("refresh", {})],
        "<function=nobody>",
    ),
    _text("qwen3-xml", "no tag", "<tool_call>{}</tool_call>"),
    _text("qwen3-xml", "no function", "<tool_call><function=></function></tool_call>"),
    _text("qwen3-xml", "a parameter alone", f"<tool_call>{_PARAMETER}a</parameter></tool_call>"),
    _text("qwen3-xml", "an end alone", "<tool_call></function></tool_call>"),
    _text("qwen3-xml", "an unfinished tag", "<tool_call><functor=mix></tool_call>"),
    # Python
    Case("bare", "pythonic", "[get_weather(city='Paris')]", calls_of(PARIS)),
    Case("bare, behind white space", "pythonic", "\n [ refresh( ) , refresh()] ", calls_of(NOTHING, NOTHING)),
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
        calls_of(NOTHING),
        "get_weather(city='P",
    ),
    Case(
        "wrong in the second",
        "pythonic",
        "[refresh(), get_weather(city=b'x')]",
        calls_of(NOTHING),
        "get_weather(city=b'x')",
    ),
    Case(
        "names that Python has not",
        "pythonic",
        "[get-weather(city='Rome'), server:tool(from='a', in=+5, class=-1, user-id=1), mcp--a--b(), "
        "a.b-c(), class(), import(x=True)]",
        [
            ("get-weather", {"city": "Rome"}),
            ("server:tool", {"from": "a", "in": 5, "class": -1, "user-id": 1}),
            *((name, {}) for name in ("mcp--a--b", "a.b-c", "class")),
            ("import", {"x": True}),
        ],
    ),
    Case(
        "more literals",
        "pythonic",
        "[mix(text='''it's, (a=1)\" \\''' ''', open=\"\"\"say \"hi\" )\"\"\", kind='', list=['', \"\"], "
        "object={2: 'a', True: {2.5: None}},)]",
        [
            (
                "mix",
                {
                    "text": "it's, (a=1)\" ''' ",
                    "open": 'say "hi" )',
                    "kind": "",
                    "list": ["", ""],
                    "object": {"2": "a", "true": {"2.5": None}},
                },
            )
        ],
    ),
    Case(
        "an unknown one of three",
        "pythonic",
        "[get_weather(city='Paris'), nobody(q=2), get_time(zone=None)]",
        calls_of(PARIS, NOON),
        "nobody(q=2)",
    ),
    Case(
        "unknown ones first",
        "pythonic",
        "[nobody(q=2), other(), refresh()] So.",
        calls_of(NOTHING),
        "nobody(q=2)\nother() So.",
    ),
    _text("pythonic", "a name twice", "[mix(text='a', text='b')]"),
    _text("pythonic", "a list of references", "[1(a)], [see(b)] and so on"),
    _text("pythonic", "a reference", "[1] See there."),
    _text("pythonic", "a number without end", "[mix(real=1e999)]"),
    _text("pythonic", "no name of an argument", "[get_weather('Paris')]"),
    _text("pythonic", "a product", "[mix(text='a' * 9)]"),
    _text("pythonic", "more arguments", "[mix(**x)]"),
    _text("pythonic", "no list", "<|python_start|>get_weather(city='Paris')<|python_end|>"),
    _text("pythonic", "brackets that do not match", "[mix(list=[1)]"),
    _text("pythonic", "cut off", "[get_weather(city='Pa"),
    # a name, then arguments
    Case(
        "without a mark inside", "mistral-args", '[TOOL_CALLS]get_weather{"city": "Paris"}', calls_of(PARIS)
    ),
    Case(
        "with an id",
        "mistral-args",
        '[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{"city": "Paris"}',
        calls_of(PARIS),
    ),
    Case(
        "white space", "mistral-args", '[TOOL_CALLS] get_weather [ARGS] {"city": "Paris"}\n', calls_of(PARIS)
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
    Case("half a pair", "pythonic", r"[mix(text='\ud83c é')]", [("mix", {"text": "\ud83c é"})]),
    # without a mark
    *(
        case
        for family in ("llama3-json", "json")
        for case in (
            Case("bare", family, f"\n{object_of(PARIS)}\n", calls_of(PARIS)),
            Case(
                "bare, with text behind",
                family,
                f"{object_of(PARIS)} I called {{it}}.",
                calls_of(PARIS),
                "I called {it}.",
            ),
            Case(
                "bare, with other JSON behind",
                family,
                f'{object_of(PARIS)} {{"a": 1}}',
                calls_of(PARIS),
                '{"a": 1}',
            ),
            _text(family, "JSON that is an answer", '{"name": "Ann", "age": 30}'),
            _text(family, "a name without arguments", '{"name": "refresh"}'),
            _text(family, "cut off", '{"name": "refresh", "arg'),
            _text(family, "JSON behind text", f"Here: {object_of(PARIS)}"),
        )
    ),
    Case("a bare array", "json", array_of([PARIS, NOON]), calls_of(PARIS, NOON)),
    _text("json", "other code", "```python\nprint({})\n```\n"),
    # other marks of a family
    Case("a mark that closes", "phi", f"<|tool_call|>{array_of([PARIS])}<|/tool_call|>", calls_of(PARIS)),
    Case("the older mark", "granite", f"<tool_call>{array_of([PARIS])}</tool_call>", calls_of(PARIS)),
    Case(
        "text where a mark is due",
        "hermes",
        f"<tool_call>{object_of(PARIS)} so</tool_call> it is",
        calls_of(PARIS),
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
        f"<tool_call>{object_of(PARIS)}<tool_call>{object_of(NOON)}",
        calls_of(PARIS, NOON),
    ),
    # messages in channels
    Case(
        "reasoning, then an answer",
        "harmony",
        f"{_THOUGHT}<|channel|>final<|message|>It is 4.\n<|return|>",
        content="It is 4.\n",
        reasoning="Hm, <b>.",
    ),
    Case("an answer alone", "harmony", "<|channel|>final<|message|>It is 4.", content="It is 4."),
    Case("no header", "harmony", "It is 4 <|x|>.", content="It is 4 <|x|>."),
    Case("two that may become one", "harmony", "to", content="to"),
    Case(
        "a call",
        "harmony",
        f"{_THOUGHT}{_TO}get_weather <|constrain|>json<|message|>{PARIS[1]}<|call|>",
        calls_of(PARIS),
        reasoning="Hm, <b>.",
    ),
    Case(
        "a call by its role",
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{PARIS[1]}",
        calls_of(PARIS),
    ),
    Case(
        "a preamble, two calls and no arguments",
        "harmony",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{_TO}refresh<|message|><|call|>"
        f"<|start|>assistant{_TO}get_time <|constrain|>json<|message|>{NOON[1]}<|call|>",
        calls_of(NOTHING, NOON),
        "I look.",
    ),
    Case(
        "an unknown tool",
        "harmony",
        f"<|channel|>final<|message|>So.<|end|><|start|>assistant{_TO}nobody<|message|>{{}}",
        content="So.\nfunctions.nobody {}",
    ),
    Case("cut off in a header", "harmony", f"{_THOUGHT}<|channel|>fi", reasoning="Hm, <b>."),
    Case(
        "cut off in arguments",
        "harmony",
        f'{_TO}get_weather <|constrain|>json<|message|>{{"city": "P',
        [("get_weather", None)],
        raw=['{"city": "P'],
    ),
    Case(
        "a message that is not ended",
        "harmony",
        "Hm.<|start|>assistant<|channel|>final<|message|>4",
        content="4",
        reasoning="Hm.",
        opens=True,
    ),
    _text("hermes", "a mark alone", "</tool_call> ends what <tool_call> begins."),
]

CASES = [*COMMON, *SPECIAL, *BRACES]
