"""Patterns of schemas hold in JSON what they hold in a text, as ECMA-262 has it."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onbeat.core.errors import InvalidRequest
from onbeat.text.grammar.source import json_grammar
from onbeat.text.grammar.translate import lark_of
from tests.grammars import COMPACT, make_compiler

COMPILER = make_compiler()
SPACE = "\t\n\v\f\r \xa0\u1680\u2000\u2007\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
WORD = "".join(chr(code) for code in range(128) if chr(code).isalnum()) + "_"
LETTERS = "\"\\'/az09AZ_-^[]&~<>|{}.\x01\x1f\x7f\x85\t\n\r é\xa0\u2028\ufeff\u4e00🦀"
"""Characters that texts are made of."""
SETS = {r"\d": "0123456789", r"\s": SPACE, r"\w": WORD}
PLAIN = "\"'/az09AZ_é🦀 .|{}<>~"


def takes(schema: Any, value: Any) -> bool:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("\x7f", r"\u007f").encode()
    guide = COMPILER.compile(json_grammar(schema, COMPACT))
    return guide.consume([*text]) == len(text) and guide.may_end


@st.composite
def classes(draw: st.DrawFn) -> tuple[str, frozenset[str]]:
    """Return a class as ECMA-262 writes it, and those of `LETTERS` that are in it."""
    parts, found = list[str](), set[str]()
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["plain", "escaped", "numbered", "range", "set", "doubled"]))
        if kind == "range":
            first, last = sorted(
                draw(st.lists(st.sampled_from("\x01\x1f !09AZaz~\xa0\u2028🦀"), min_size=2, max_size=2))
            )
            parts.append(f"{first}-{last}")
            found |= {each for each in LETTERS if first <= each <= last}
        elif kind == "set":
            name = draw(st.sampled_from([r"\d", r"\s", r"\w", r"\D", r"\S", r"\W"]))
            parts.append(name)
            found |= {each for each in LETTERS if (each in SETS[name.lower()]) == name.islower()}
        elif kind == "doubled":
            parts.append(draw(st.sampled_from(["&&", "~~", "[", "[a", "|"])))
            found |= set(parts[-1])
        else:
            each = draw(
                st.sampled_from(PLAIN if kind == "plain" else r"\]^-[/.\"" if kind == "escaped" else LETTERS)
            )
            code = f"{ord(each):04x}"
            number = f"\\u{code}" if len(code) == 4 else f"\\u{{{code}}}"
            parts.append({"plain": each, "escaped": f"\\{each}", "numbered": number}[kind])
            found.add(each)
    is_negated = draw(st.booleans())
    text = "".join(parts)
    if not is_negated and text.startswith("^"):
        text = "a" + text
        found.add("a")
    return f"[{'^' * is_negated}{text}]", frozenset(LETTERS) - found if is_negated else frozenset(found)


@given(classes(), classes(), st.lists(st.sampled_from(LETTERS), min_size=1, max_size=3).map("".join))
def test_a_class_holds_its_characters_and_no_others(
    one: tuple[str, frozenset[str]], other: tuple[str, frozenset[str]], text: str
) -> None:
    (first, of_first), (second, of_second) = one, other
    expected = text[0] in of_first and all(each in of_first | of_second for each in text[1:])
    schema = {"type": "string", "pattern": f"^{first}(?:{first}|{second})*$"}
    if any(each in LETTERS for each in of_first):
        assert takes(schema, text) == expected
        key = {"type": "object", "patternProperties": {schema["pattern"]: {}}, "additionalProperties": False}
        assert takes(key, {text: 1}) == expected


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r'^[^"]$', ["a", "\\", "\n"], ['"', ""]),
        (r"^[^\\]*$", ["a\n", '"'], ["\\", "a\\b"]),
        (r'^[^<>:"/\\|?*]+$', ["file.txt"], ['a"b', "a\\b", "a/b"]),
        (r"^(?:[^\\]|\\.)*$", [r"a\b", "\\\\"], ["\\", "a\\"]),
        (r"^'[^'\\]*'$", ["'a\"'"], ["'\\'", "'''"]),
        (r"^\P{P}+$", ["ab\x01"], ['"', "\\"]),
        (r"^\p{Cc}$", ["\x01"], ['"', "\\"]),
        (r"^[^]$", ["\n", '"'], ["", "ab"]),
        (r"^a.b$", ["a\tb", 'a"b'], ["a\nb", "a\rb", "a\u2028b"]),
        (r"^\uD83E\uDD80[\uD83E\uDD80]\u{1f980}$", ["🦀🦀🦀"], ["🦀🦀"]),
        (r"^\cJ[\b]$", ["\n\b"], ["J\b"]),
        (r"^a{,2}\<$", ["a{,2}<"], ["aa<", "<"]),
        (r"[[&&]", ["a&", "["], ["a", "]"]),
    ],
)
def test_what_a_pattern_forbids_cannot_be_said(pattern: str, right: list[str], wrong: list[str]) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert [each for each in right if not takes(schema, each)] == []
    assert [each for each in wrong if takes(schema, each)] == []


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]+$',
        r"^[^\\/]+$",
        r'^"[^"]*"$',
        r"^[^,]*,[^,]*$",
        r"^[^\d\"]$",
        r"^(a|[^a\"])+$",
        r"^[^\x00-\x1f\\]*$",
    ],
)
@given(text=st.text(st.sampled_from('"\\/,a\x01\x1f é🦀'), max_size=4))
def test_it_is_what_a_validator_takes(pattern: str, text: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"pattern": pattern, "type": "string"}}},
    }
    assert takes({**schema, "required": ["a"]}, {"a": [text]}) == (re.search(pattern, text) is not None)
    assert jsonschema.Draft202012Validator(schema).is_valid({"a": [text]}) == takes(schema, {"a": [text]})


def test_data_and_names_are_no_patterns() -> None:
    schema = {"const": {"pattern": "[^a", "patternProperties": {"[": 1}}}
    assert takes(schema, schema["const"])
    named = {"type": "object", "properties": {"pattern": {"enum": ["["]}}, "required": ["pattern"]}
    assert takes(named, {"pattern": "["})


@pytest.mark.parametrize("pattern", [r"^\0$", "^\x00", r"a\u0000", r"^[a", r"\x00|[^\"]"])
def test_what_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidRequest, match="the pattern") as refusal:
        json_grammar({"type": "string", "pattern": pattern})
    assert refusal.value.code == "unsupported_schema"


def test_schemas_inside_of_a_grammar_are_held_as_well() -> None:
    text = lark_of(r'start: "x" %json {"type": "string", "pattern": "^[^\"]$"} "y"')
    assert r"[[^\"]--\\x00]" in text
    assert text.startswith('start: "x" %json {')
    assert text.endswith('} "y"')
