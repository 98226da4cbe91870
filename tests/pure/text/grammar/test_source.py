"""Texts that sources of grammars accept, by the library that enforces them."""

from collections.abc import Callable
from typing import Any

import pytest

from onbeat.core.request import Grammar
from onbeat.text.grammar import source
from onbeat.text.grammar.limits import TooComplex
from onbeat.text.grammar.source import (
    JsonStyle,
    choice_grammar,
    embedded_json,
    json_grammar,
    lark_grammar,
    lark_text,
    regex_grammar,
)
from onbeat.text.grammar.translate import closed
from tests.grammars import COMPACT

llguidance = pytest.importorskip("llguidance")

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}


def problem(grammar: Grammar) -> str:
    """Return why the library refuses a grammar; empty where it takes it."""
    return str(llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.text, log_level=0).get_error())


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar.text, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def test_json_has_white_space_up_to_a_bound():
    grammar = json_grammar(POINT)
    assert accepts(grammar, '{ "x":\n 1}') is source.bounds_white_space()
    assert accepts(grammar, '{"x":\n 1}')
    assert not accepts(grammar, '{"x":' + " " * 17 + "1}")
    assert not accepts(grammar, '{"y": 1}')


def test_white_space_has_a_bound_with_an_older_library_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(source, "bounds_white_space", lambda: False)
    grammar = json_grammar({"type": "array", "items": {"type": "integer"}})
    assert accepts(grammar, "[1 ,\n 2]")
    assert not accepts(grammar, "[1," + " " * 17 + "2]")


def test_compact_json_has_none():
    assert accepts(json_grammar(POINT, COMPACT), '{"x":1}')
    assert not accepts(json_grammar(POINT, COMPACT), '{"x": 1}')


def test_the_options_of_a_schema_do_not_win():
    schema = {**POINT, "x-guidance": {"whitespace_pattern": "[ ]*"}}
    assert not accepts(json_grammar(schema), '{"x":' + " " * 17 + "1}")


def test_a_boolean_is_a_schema():
    assert accepts(json_grammar(True), '[1, {"a": null}]')
    assert "satisf" in problem(json_grammar(False))


def test_lenient_drops_what_cannot_be_enforced():
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    assert "uniqueItems" in problem(json_grammar(schema))
    assert accepts(json_grammar(schema, JsonStyle(is_lenient=True)), "[1, 1]")


def test_lark_with_schemas_inside():
    call = embedded_json(POINT, COMPACT)
    grammar = lark_grammar(f'start: call+\ncall: {lark_text("<call>")} {call} "</call>"\n')
    assert accepts(grammar, '<call>{"x":1}</call><call>{"x":2}</call>')
    assert not accepts(grammar, '<call>{"y":1}</call>')


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a/b", "a/b"),
        (r"a\/b", "a/b"),
        (r"a\\/b", r"a\/b"),
        ("a\nb", "a\nb"),
        ("a\\\nb", "a\nb"),
        ("(?i)ab|c", "AB"),
        ("", ""),
        ('"é"', '"é"'),
    ],
)
def test_a_pattern_is_matched_as_a_whole(pattern: str, text: str):
    grammar = regex_grammar(pattern)
    assert accepts(grammar, text)
    assert not accepts(grammar, text + "!")


@pytest.mark.parametrize("choice", ['q"\\\n\t', "\x00\x7f\x1b", "é\u2028😀", "/", ""])
def test_a_choice_is_taken_to_the_letter(choice: str):
    grammar = choice_grammar([choice, "other"])
    assert accepts(grammar, choice)
    assert accepts(grammar, "other")
    assert not accepts(grammar, choice + "other" * 2)


def test_equal_texts_have_one_key():
    assert json_grammar(POINT) == json_grammar(dict(POINT))
    assert json_grammar(POINT).key != json_grammar(POINT, COMPACT).key


LONG: str = "a" * 300_000
DEEP: Any = {}
for _ in range(300):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    "make",
    [
        lambda: json_grammar({"const": LONG}),
        lambda: json_grammar({"enum": [[]] * 120_000}),
        lambda: json_grammar(DEEP),
        lambda: json_grammar(POINT, JsonStyle(white_space=LONG)),
        lambda: closed({"const": LONG}),
        lambda: closed(DEEP),
        lambda: regex_grammar(LONG),
        lambda: choice_grammar([LONG]),
        lambda: lark_grammar(f"start: {LONG}"),
        lambda: lark_grammar("start: " + "\N{SNOWMAN}" * 100_000),
    ],
)
def test_what_is_too_long_or_too_deep_is_measured_before_anything_is_made_of_it(
    make: Callable[[], object], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(source, "Grammar", None)  # whose text is copied and hashed
    monkeypatch.setattr(source, "_slashes_escaped", None)
    with pytest.raises(TooComplex) as refusal:
        make()
    assert refusal.value.code == "grammar_too_complex"
