"""What a grammar may take: hostile ones are refused in words and in time; the next one is tried as ever."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from onbeat.core.request import Grammar
from onbeat.text.grammar.guard import GrammarGuard
from onbeat.text.grammar.limits import MOST_OPTIONAL
from onbeat.text.grammar.source import JsonStyle, choice_grammar, json_grammar, lark_grammar, regex_grammar
from tests.grammars import EOS, VOCAB_SIZE, WORDS, make_compiler
from tests.schemas import FLAG, SCHEMAS, thing

MOST_SECONDS = 2.0


class BytesTokenizer:
    """A vocabulary of bytes and some words."""

    vocab_size = EOS + 1
    bos_token_id = None
    eos_token_ids = (EOS,)
    special_token_ids = frozenset([EOS])

    def token_bytes(self, token_id: int) -> bytes:
        return [*(bytes([byte]) for byte in range(256)), *WORDS, b"<end>"][token_id]


@pytest.fixture(scope="module")
def guard() -> Iterator[GrammarGuard]:
    made = GrammarGuard(BytesTokenizer(), VOCAB_SIZE)  # type: ignore[arg-type]
    assert made.check(regex_grammar("a")).problem is None
    yield made
    made.close()


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(length: int) -> Any:
    names = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**names, f"a{length}": {"type": "integer"}}}


def array_types(length: int) -> Any:
    names = {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": {**names, f"a{length}": {"type": "integer"}}}


def optional(number: int, *, per_object: int) -> Any:
    objects = [
        {
            "type": "object",
            "properties": {f"p{i}": {"type": "integer"} for i in range(start, start + per_object)},
        }
        for start in range(0, number, per_object)
    ]
    return {"type": "array", "prefixItems": objects}


def lark_chain(length: int) -> str:
    rules = [f"r{i}: r{i + 1}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "a"'])


DEAR: Any = {"anyOf": [optional(200, per_object=200)["prefixItems"][0] for _ in range(6)]}
"""Rows of the parser hold each of its branches."""
HOSTILE: dict[str, tuple[Grammar, str]] = {
    "long": (Grammar.of(f'start: "{"x" * 300_000}"'), "characters of text"),
    "deep": (json_grammar(nested(200)), "nested deeper than 64"),
    "deeper": (Grammar.of("start: %json " + json.dumps({"x": nested(400)})), "nested deeper than 64"),
    "references": (json_grammar(chain(3000)), "more than 200 steps"),
    "array types": (json_grammar(array_types(2000)), "more than 200 steps"),
    "rules in a chain": (lark_grammar(lark_chain(900)), "more than 200 steps"),
    "rules": (lark_grammar(lark_chain(4000)), "4002 rules"),
    "multiple": (json_grammar({"type": "integer", "multipleOf": 999_983}), "multipleOf is 999983"),
    "small multiple": (json_grammar({"type": "number", "multipleOf": 1.00003}), "multipleOf is 1.00003"),
    "multiples together": (
        json_grammar({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}),
        "multipleOf in one allOf",
    ),
    "optional": (json_grammar(optional(2000, per_object=2000)), "optional properties in one object"),
    "properties": (json_grammar(optional(4000, per_object=200)), "4000 properties"),
    "values": (json_grammar({"enum": list(range(20_000))}), "20000 values"),
    "choices": (choice_grammar([f"c{i}" for i in range(10_001)]), "10001 values"),
    "patterns": (
        json_grammar({"prefixItems": [{"type": "string", "pattern": f"a{i}"} for i in range(201)]}),
        "201 patterns",
    ),
    "long pattern": (json_grammar({"type": "string", "pattern": "ab?" * 1000}), "characters of a pattern"),
    "patterns together": (
        json_grammar({"type": "string", "allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghijklmnop"]}),
        "patterns in one allOf",
    ),
    "look-ahead": (regex_grammar("(?=a)b"), "look-around"),
    "back-reference": (regex_grammar(r"(a)\1"), "backreference"),
    "foreign reference": (json_grammar({"$ref": "https://example.com/x.json"}), "cannot be enforced"),
    "no such reference": (json_grammar({"$ref": "#/$defs/none"}), "cannot be enforced"),
    "reference to itself": (json_grammar({"$ref": "#"}), ""),
    "contradiction": (json_grammar({"type": "string", "minLength": 5, "maxLength": 2}), "cannot be enforced"),
    "nothing": (json_grammar(False), "cannot be enforced"),
    "unsupported": (json_grammar({"type": "array", "uniqueItems": True}), "'uniqueItems'"),
    "no such type": (json_grammar({"type": "text"}), "cannot be enforced"),
    "no Lark": (lark_grammar("this is no grammar"), "cannot be enforced"),
    "no start": (lark_grammar('other: "a"'), "cannot be enforced"),
    "endless rule": (lark_grammar("start: start"), ""),
    "dear behind a last property": (
        json_grammar(thing({}, {f"p{i}": FLAG for i in range(9)} | {"last": DEAR})),
        "5 ms",
    ),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_in_words_and_in_time(guard: GrammarGuard, name: str) -> None:
    grammar, words = HOSTILE[name]
    start = time.monotonic()
    verdict = guard.check(grammar)
    assert time.monotonic() - start < MOST_SECONDS
    assert verdict.problem is not None
    assert words in verdict.problem, verdict.problem
    assert verdict.code in ("grammar_too_complex", "unsupported_schema")
    assert len(verdict.problem) < 700
    assert guard.check(json_grammar({"enum": [name]})).problem is None, "the next one is tried"
    assert guard.known(grammar) is verdict


def test_a_process_that_ends_is_replaced(guard: GrammarGuard) -> None:
    """Whatever the limits let pass."""
    limited = guard._process
    assert limited is not None
    assert limited._process is not None
    limited._process.kill()
    verdict = guard.check(regex_grammar("killed"))
    assert "exit code -9" in str(verdict.problem)
    assert guard.check(regex_grammar("killed")).problem is None, "it was not at fault"


def test_what_takes_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onbeat.text.grammar.guard.MAX_SECONDS", 1e-5)
    guard = GrammarGuard(BytesTokenizer(), VOCAB_SIZE)  # type: ignore[arg-type]
    verdict = guard.check(json_grammar({"enum": list(range(9000))}))
    guard.close()
    assert "1e-05 s" in str(verdict.problem)
    assert verdict.code == "grammar_too_complex"


def test_schemas_of_programs_pass(guard: GrammarGuard) -> None:
    for schema in SCHEMAS:
        assert guard.check(json_grammar(schema)).problem is None, schema
    small = [schema for schema in SCHEMAS if "$ref" not in json.dumps(schema)]
    large = {"type": "object", "properties": {f"p{i}": small[i % len(small)] for i in range(300)}}
    assert len(json.dumps(large)) > 30_000
    assert guard.check(json_grammar({**large, "required": [f"p{i}" for i in range(250)]})).problem is None


def test_an_engine_has_room_for_what_passes(guard: GrammarGuard) -> None:
    """It is told no sooner than a trial that a grammar is too complex, wherever an answer goes."""
    grammar = json_grammar(optional(MOST_OPTIONAL, per_object=MOST_OPTIONAL)["prefixItems"][0])
    verdict = guard.check(grammar)
    assert verdict.problem is None
    assert 0 < verdict.seconds < 0.002
    for name in (0, MOST_OPTIONAL // 2, MOST_OPTIONAL - 1):
        guide = make_compiler().compile(grammar)
        text = f'{{"p{name}" : 1 , "other": [1, {{}}] }}'.encode()
        assert guide.consume([*text]) == len(text)


def test_ignored_keywords_are_named(guard: GrammarGuard) -> None:
    schema = {
        "type": "array",
        "uniqueItems": True,
        "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    }
    assert guard.check(json_grammar(schema, JsonStyle(is_lenient=True))).ignored == ("uniqueItems", "oneOf")
