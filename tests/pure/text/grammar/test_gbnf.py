"""llama.cpp's grammars are read as llama.cpp reads them: no rule takes what must come behind it."""

from __future__ import annotations

import pytest

from onbeat.core.errors import InvalidRequest
from onbeat.text.grammar.source import lark_grammar
from onbeat.text.grammar.translate import lark_of
from tests.grammars import make_compiler

COMPILER = make_compiler()
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws

array  ::=
  "[" ws (
            value
    ("," ws value)*
  )? "]" ws

string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws

number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws

# Optional space: by convention, applied in this grammar after literal chars when allowed
ws ::= | " " | "\n" [ \t]{0,20}
"""


def takes(grammar: str, text: str) -> bool:
    guide = COMPILER.compile(lark_grammar(lark_of(grammar)))
    return guide.consume([*text.encode()]) == len(text.encode()) and guide.may_end


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('root ::= t "."\nt ::= [^\\n]*', ["hi.", ".", "a.b."], ["hi", "a\n."]),
        (ARITHMETIC, ["a=1\n", "(x +12)*y = z \n\nb=2\n", "ab1 = a\n"], ["a=1", "=1\n", "1a=2\n"]),
        (
            JSON,
            ['{"a": [1, -2.5e+3 ,true],\n "b":{}} ', '{"é\\u00e9\\"": null}'],
            ["{", "[1]", '{"a":01}', "{'a':1}"],
        ),
        ('root ::= [a-z]+ | root "," root', ["ab,c,d"], [",a", "a,"]),
        ('root ::= "a" root "b" | "ab" | "a"', ["ab", "aabb", "aab", "aaabbb", "a"], ["abb", "b"]),
        ('root ::= "if" x | x\nx ::= [a-z]+ ("(" x ")")?', ["ifa", "i", "iffy(a)", "inf"], ["if(", "("]),
        (r'root ::= "\u00e9" "\U0001F980" [\U0001F980]', ["é🦀🦀"], ["é🦀"]),
        (r"root ::= [\-a] [\^a] [a&&b] [^^] [a^-]", ["-^&b^", "aaba-"], ["b^&b^", "a^&^^"]),
        (
            "root ::= [ab]{,2} [c]{2} [d]{1,} [e]{ 1 , 2 }",
            ["ccde", "abccdddee"],
            ["abaccde", "cde", "ccdeee"],
        ),
        ('root ::= start "!"\nstart ::= "a"', ["a!"], ["a"]),
        (
            'root ::= "a"\n  | "b" # or\n  # a comment\n  | start-Of_x\nstart-Of_x ::= .',
            ["a", "b", "\n"],
            ["ab", ""],
        ),
        ('root ::= ""', [""], ["a"]),
    ],
)
def test_a_grammar_takes_what_it_says(grammar: str, right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not takes(grammar, text)] == []
    assert [text for text in wrong if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "named"),
    [
        ("root ::= other", "'other'"),
        ("a ::= [a]", "'root'"),
        ('root ::= ("a"', "'root'"),
        ('root ::= "a")', "'root'"),
        ("root ::= *", "'root'"),
        ("root ::= [z-a]", "'root'"),
        ('root ::= "a"\nb = "c"', "'= \"c\"'"),
    ],
)
def test_what_is_none_is_refused_by_the_name_of_its_rule(grammar: str, named: str) -> None:
    with pytest.raises(InvalidRequest, match="GBNF") as refusal:
        lark_of(grammar)
    assert named in str(refusal.value)
