"""Grammars of answers with calls: what they allow, and that it is read as the calls that were meant."""

from __future__ import annotations

import json
from itertools import count
from random import Random
from typing import Any

import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.core.request import Grammar
from onbeat.text.grammar.compiler import GrammarCompiler, Vocabulary
from onbeat.text.grammar.source import json_grammar, lark_grammar
from onbeat.text.reply.calls import CallStart, CallText, ContentText, MarkToken
from onbeat.text.reply.families import FAMILIES, HARMONY_MARKS, REASONING
from onbeat.text.reply.grammar import WantedCalls, answer_grammar
from onbeat.text.reply.harmony import new_reader
from onbeat.text.reply.parser import ReplyOptions, ReplyStyle
from onbeat.text.reply.xml_calls import types_of
from tests.fakes_engine import ByteTokenizer
from tests.pure.text.reply.reading import Read, merged

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "unit": {"enum": ["C", "F"]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKS = ("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>", "<|tool_call|>", "<|python_tag|>", *HARMONY_MARKS)


class TextTokenizer(ByteTokenizer):
    """Spells all marks as text."""

    special_token_ids = frozenset((256, 257))
    vocab_size = 258


class MarksTokenizer(ByteTokenizer):
    """Has special tokens for some marks."""

    special_token_ids = frozenset(range(256, 258 + len(MARKS)))
    vocab_size = 258 + len(MARKS)
    _special = {256: b"<eos>", 257: b"<bos>", **{258 + i: mark.encode() for i, mark in enumerate(MARKS)}}  # noqa: RUF012 -- never changed

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else self._special[token_id]


TOKENIZERS = {"text": TextTokenizer(), "tokens": MarksTokenizer()}
COMPILERS = {
    name: GrammarCompiler(Vocabulary.of(tokenizer, tokenizer.vocab_size), tokenizer.vocab_size)
    for name, tokenizer in TOKENIZERS.items()
}


def style_of(family: str, marks: str, *, reasons: bool = False) -> ReplyStyle:
    return ReplyStyle(FAMILIES[family], REASONING["think"] if reasons else None, TOKENIZERS[marks])


END = list(b"\n</parameter>\n")


def walked(grammar: Grammar, marks: str, seed: int) -> list[int]:
    """Return an answer that a grammar allows: at random, and short."""
    guide, rng = COMPILERS[marks].compile(grammar), Random(seed)
    answer: list[int] = []
    while not guide.is_complete and len(answer) < 2000:
        if guide.may_end and rng.random() < 0.3:
            break
        # what chance alone would not spell
        if rng.random() < 0.3 and guide.copy().consume(END) == len(END):
            answer += END[: guide.consume(END)]
            continue
        allowed = set(map(int, guide.allowed()))
        closers = [each for each in b'"}]>0123' if each in allowed]
        letters = [each for each in allowed if chr(each) in 'abc</[{"' or each >= 256]
        # texts end, numbers too
        pool = closers if closers and rng.random() < 0.5 else letters or sorted(allowed)
        answer.append(rng.choice(pool))
        assert guide.accepts(answer[-1])
    return answer


def is_allowed(grammar: Grammar, marks: str, answer: list[int]) -> bool:
    guide = COMPILERS[marks].compile(grammar)
    return all(guide.accepts(each) for each in answer) and guide.may_end


def tokens(text: str, marks: str) -> list[int]:
    """Return the tokens of a text, marks as special tokens where there are some."""
    result, tokenizer = list[int](), TOKENIZERS[marks]
    special = {tokenizer.token_text(each): each for each in sorted(tokenizer.special_token_ids)[2:]}
    while text:
        mark = next((mark for mark in special if mark and text.startswith(mark)), None)
        result += text[0].encode() if mark is None else [special[mark]]
        text = text[len(mark or text[0]) :]
    return result


def read(style: ReplyStyle, answer: list[int], marks: str, **options: Any) -> Read:
    ids = count()
    defaults: dict[str, Any] = {"tools": TOOLS, "new_call_id": lambda: str(next(ids)), "is_guided": True}
    parser = new_reader(style, ReplyOptions(**(defaults | options)))
    found, tokenizer = [], TOKENIZERS[marks]
    data = b""
    for token_id in answer:
        if token_id < 256:
            data += bytes([token_id])
            continue
        found += parser.push(
            [data.decode(errors="replace"), MarkToken(tokenizer.token_text(token_id))], final=False
        )
        data = b""
    found += parser.push([data.decode(errors="replace")], final=True)
    result = Read()
    for event in merged(found):
        match event:
            case CallStart(name=name):
                result.calls.append((name, ""))
            case CallText(index=index, text=text):
                result.calls[index] = (result.calls[index][0], text)
            case ContentText(text=text):
                result.content += text
    return result


def wanted(**fields: Any) -> WantedCalls:
    defaults: dict[str, Any] = {"strict": frozenset(TOOLS), "is_required": True, "is_single": False}
    return WantedCalls(schemas=TOOLS, **(defaults | fields))


def check(name: str, arguments: Any) -> None:
    if name == "stop":
        assert arguments == {}
        return
    assert name == "get_weather"
    assert arguments.keys() <= {"city", "days", "unit"}
    assert isinstance(arguments["city"], str)
    assert 1 <= arguments["days"] <= 9
    assert arguments.get("unit", "C") in ("C", "F")


FORMS = sorted(FAMILIES)


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize("family", FORMS)
def test_what_is_required_is_what_comes(family: str, marks: str) -> None:
    style = style_of(family, marks).guided
    for is_single in (False, True):
        grammar = answer_grammar(style, wanted(is_single=is_single), None, opens_in_reasoning=False)
        for seed in range(12):
            answer = walked(grammar, marks, seed)
            found = read(style, answer, marks)
            assert found.calls, bytes(each for each in answer if each < 256)
            assert found.content.strip() == ""
            for name, arguments in found.arguments:
                check(name, arguments)
            if is_single:
                assert len(found.calls) == 1


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize("family", FORMS)
def test_strict_tools_leave_text_free_and_calls_not(family: str, marks: str) -> None:
    style = style_of(family, marks).guided
    grammar = answer_grammar(style, wanted(is_required=False), None, opens_in_reasoning=False)
    text = FAMILIES[family].text_opening + "It is {sunny} <b>there</b>."
    assert is_allowed(grammar, marks, tokens(text, marks))
    num_calls = 0
    for seed in range(12):
        found = read(style, walked(grammar, marks, seed), marks)
        num_calls += len(found.calls)
        for name, arguments in found.arguments:
            check(name, arguments)
    forced = answer_grammar(style, wanted(is_single=True), None, opens_in_reasoning=False)
    for seed in range(6):
        assert is_allowed(grammar, marks, walked(forced, marks, seed))


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize("family", ["hermes", "json", "mistral-args"])
def test_reasoning_comes_first_and_calls_nothing(family: str, marks: str) -> None:
    style = style_of(family, marks, reasons=True).guided
    call = tokens(
        {
            "hermes": '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
            "json": '{"name": "stop", "arguments": {}}',
            "mistral-args": "[TOOL_CALLS]stop[ARGS]{}",
        }[family],
        marks,
    )
    closed = answer_grammar(style, wanted(), None, opens_in_reasoning=False)
    opened = answer_grammar(style, wanted(), None, opens_in_reasoning=True)
    for text, is_closed, is_opened in (
        ("", True, False),
        ("<think>A</think>\n\n", True, True),
        ("A</think>", False, True),
        ("A", False, False),
    ):
        thought = tokens(text, marks)
        assert is_allowed(closed, marks, thought + call) is is_closed, text
        # a model may repeat the opening mark, if it is text
        if text != "<think>A</think>\n\n" or marks == "text":
            assert is_allowed(opened, marks, thought + call) is is_opened, text
    inside = [
        *tokens("<think>", marks),
        *(each for each in call if each < 256),
        *tokens("</think>", marks),
        *call,
    ]
    found = read(style, inside, marks)
    assert found.calls == [("stop", "{}")]


def test_a_schema_of_the_answer_goes_with_tools_and_with_reasoning() -> None:
    schema = {
        "type": "object",
        "properties": {"start": {"const": "start"}},
        "required": ["start"],
        "additionalProperties": False,
    }
    text = json_grammar(schema)
    style = style_of("hermes", "text", reasons=True).guided
    alone = answer_grammar(style, None, text, opens_in_reasoning=False)
    beside = answer_grammar(style, wanted(is_required=False), text, opens_in_reasoning=False)
    for answer, fits_alone, fits_beside in (
        ('{"start":"start"}', True, True),
        ('<think>x</think>{"start":"start"}', True, True),
        ('<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>', False, True),
        ('{"given_":"start"}', False, False),
        ("text", False, False),
    ):
        assert is_allowed(alone, "text", tokens(answer, "text")) is fits_alone, answer
        assert is_allowed(beside, "text", tokens(answer, "text")) is fits_beside, answer


@pytest.mark.parametrize("marks", TOKENIZERS)
def test_a_schema_of_the_answer_holds_in_the_final_channel(marks: str) -> None:
    style = ReplyStyle(FAMILIES["harmony"], REASONING["harmony"], TOKENIZERS[marks]).guided
    grammar = answer_grammar(style, None, json_grammar({"const": 5}), opens_in_reasoning=False)
    final, thought = (
        "<|channel|>final<|message|>5",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    )
    for answer, fits in ((final, True), (thought + final, True), (thought, False), ("5", False)):
        assert is_allowed(grammar, marks, tokens(answer, marks)) is fits, answer
    assert read(style, tokens(thought + final, marks), marks).content == "5"


def test_the_first_rule_of_a_grammar_is_renamed_and_nothing_else() -> None:
    text = lark_grammar('start: "start" | more /a start/ // start\nmore: start "x"\n%llguidance {"x": 1}')
    grammar = answer_grammar(
        style_of("hermes", "text", reasons=True).guided, None, text, opens_in_reasoning=False
    )
    assert 'given_: "start" | more /a start/ // start\nmore: given_ "x"\n' in grammar.text
    assert is_allowed(grammar, "text", list(b"<think></think>startxa start"))


def test_tags_refuse_what_they_cannot_keep_to() -> None:
    style = style_of("qwen3-xml", "text").guided
    for value, named in (
        ({"type": "string", "pattern": "a"}, "pattern"),
        ({"type": "string", "maxLength": 3}, "maxLength"),
    ):
        calls = WantedCalls(
            schemas={"f": {"type": "object", "properties": {"a": value}}},
            strict=frozenset("f"),
            is_required=True,
            is_single=False,
        )
        with pytest.raises(InvalidRequest, match=f"'f' .*strict.*'{named}'"):
            answer_grammar(style, calls, None, opens_in_reasoning=False)


NUMBER = {"type": "integer"}
HIDDEN: list[dict[str, Any]] = [
    {"$ref": "#/$defs/Twice"},
    {"allOf": [{"$ref": "#/$defs/Number"}]},
    {"anyOf": [{"$ref": "#/$defs/Number"}, {"type": "null"}]},
    {"oneOf": [{"$ref": "#/$defs/Twice"}, {"type": "array"}]},
    {"$ref": "#/properties/b"},
    {"$ref": "#/$defs/Kind"},
]


@pytest.mark.parametrize("schema", HIDDEN)
@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
def test_values_in_tags_are_held_to_what_references_lead_to(
    schema: dict[str, Any], is_strict: bool, is_whole: bool
) -> None:
    if is_strict and "oneOf" in schema:
        schema = {"anyOf": schema["oneOf"]}
    definitions = {"Number": NUMBER, "Twice": {"$ref": "#/$defs/Number"}, "Kind": {"enum": ["5", "x y"]}}
    tool: dict[str, Any] = {"properties": {"a": schema, "b": NUMBER}, "required": ["a"]}
    if is_whole:
        definitions["Whole"], tool = tool, {"$ref": "#/$defs/Whole", "properties": {"b": NUMBER}}
    tool["$defs"] = definitions
    calls = WantedCalls(
        schemas={"f": tool}, strict=frozenset("f" * is_strict), is_required=True, is_single=True
    )
    style = style_of("qwen3-xml", "text").guided
    grammar = answer_grammar(style, calls, None, opens_in_reasoning=False)
    for value, fits in (("5", True), ("hello", False), ("5x", False)):
        answer = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
        assert is_allowed(grammar, "text", list(answer.encode())) is fits, value
        if fits:
            ((_, text),) = read(style, list(answer.encode()), "text", tools={"f": tool}).calls
            assert json.loads(text) == {"a": "5" if "Kind" in str(schema) else 5}


def test_a_closing_tag_inside_of_a_text_breaks_no_strict_object() -> None:
    tool = {
        "properties": {"a": {"type": "object", "properties": {"b": {"enum": ["</parameter></function>"]}}}}
    }
    calls = WantedCalls(schemas={"f": tool}, strict=frozenset("f"), is_required=True, is_single=True)
    style = style_of("qwen3-xml", "text").guided
    answer = (
        b'<tool_call>\n<function=f>\n<parameter=a>\n{"b": "</parameter></function>"}\n</parameter>\n'
        b"</function>\n</tool_call>"
    )
    assert is_allowed(answer_grammar(style, calls, None, opens_in_reasoning=False), "text", list(answer))
    found = read(style, list(answer), "text", tools={"f": tool})
    assert found.arguments == [("f", {"a": {"b": "</parameter></function>"}})]


@pytest.mark.parametrize("opens", [False, True])
def test_marks_of_reasoning_in_a_strict_answer_stay(opens: bool) -> None:
    schema = {"enum": ["</think>", {"a": "</think>", "b": "<think>"}]}
    style = style_of("hermes", "text", reasons=True).guided
    grammar = answer_grammar(style, None, json_grammar(schema), opens_in_reasoning=opens)
    for text in ('"</think>"', '{"a":"</think>","b":"<think>"}'):
        for thought in ("x</think>" if opens else "<think>x</think>", "" if not opens else "</think>"):
            answer = list((thought + text).encode())
            assert is_allowed(grammar, "text", answer)
            assert read(style, answer, "text", tools={}, opens_in_reasoning=opens).content == text
    choice = lark_grammar('start: "</think>" | "x"')
    grammar = answer_grammar(style, None, choice, opens_in_reasoning=opens)
    answer = list(("x</think></think>" if opens else "</think>").encode())
    assert is_allowed(grammar, "text", answer)
    assert read(style, answer, "text", tools={}, opens_in_reasoning=opens).content == "</think>"


@pytest.mark.parametrize(
    "schema", [{"properties": 5}, {"properties": [1]}, {"properties": {}, "required": 5}]
)
def test_tags_refuse_a_schema_that_is_none(schema: Any) -> None:
    style = style_of("qwen3-xml", "text").guided
    calls = WantedCalls(schemas={"f": schema}, strict=frozenset(), is_required=True, is_single=False)
    with pytest.raises(InvalidRequest, match=r"'f' .*valid: properties"):
        answer_grammar(style, calls, None, opens_in_reasoning=False)


@pytest.mark.parametrize("schema", [{"type": None}, {"type": 5}, {"type": [None, "string"]}, {"anyOf": 5}])
def test_what_is_no_type_says_nothing(schema: Any) -> None:
    assert types_of(schema, schema) == {"string"}


def test_tools_that_are_not_strict_are_held_to_what_can_be_enforced() -> None:
    schema = {"properties": {"a": {"type": "integer", "not": {"const": 3}}}, "required": ["a"]}
    for family in FORMS:
        calls = WantedCalls(schemas={"f": schema}, strict=frozenset(), is_required=True, is_single=True)
        style = style_of(family, "tokens").guided
        grammar = answer_grammar(style, calls, None, opens_in_reasoning=False)
        ((name, text),) = read(style, walked(grammar, "tokens", 1), "tokens", tools={"f": schema}).calls
        assert (name, type(json.loads(text)["a"])) == ("f", int)
