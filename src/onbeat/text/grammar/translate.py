"""Other forms of grammars in ours: GBNF, and schemas as they are meant to be read.

llama.cpp's GBNF as Lark, letter by letter where that makes a difference.

A terminal of the library takes the longest text that it matches. So one stands only for texts that do not
begin one another, and for a grammar without recursion as a whole. All else is read letter by letter.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from functools import reduce
from itertools import takewhile
from typing import Any, NamedTuple

from onbeat.core.errors import InvalidRequest
from onbeat.text.grammar.limits import check_schema, check_size, schemas_in
from onbeat.text.grammar.source import DATA, changed, with_rust_patterns

_TOKEN = re.compile(
    r'\s+|#[^\n]*|(::=|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|\{\s*\d*\s*(?:,\s*\d*\s*)?\}|[\w-]+|[|()*+?.])',
    re.DOTALL,
)
_LETTER = re.compile(r"\\x([\da-fA-F]{2})|\\u([\da-fA-F]{4})|\\U([\da-fA-F]{8})|\\(.)|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}
_LAST = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]


class Node(NamedTuple):
    """A part of a rule."""

    kind: str
    """`set` of letters, `seq`, `or`, `many` or `rule`."""
    parts: tuple[Node, ...] = ()
    ranges: Ranges = ()
    name: str = ""
    times: tuple[int, int | None] = (1, 1)


class _Facts(NamedTuple):
    """What can be said of the texts of a part: sets of ranges of letters, as bits."""

    is_empty: bool
    """Whether the empty text is one."""
    first: int
    after: int
    """Letters with which a text may go on to a longer one, and maybe others."""
    letters: int


def _refuse(why: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar is not valid GBNF: {why}")


class _Reader:
    """Reads rules."""

    def __init__(self, text: str) -> None:
        self._tokens = list[str]()
        self._place, end = 0, 0
        while end < len(text):
            found = _TOKEN.match(text, end)
            if found is None:
                raise _refuse(f"{text[end : end + 20]!r} is nothing that a rule may have")
            self._tokens += [found[1]] if found[1] else []
            end = found.end()
        self._name = ""
        self.rules: dict[str, Node] = {}
        while self._place < len(self._tokens):
            self._name, sign = self._take(), self._take()
            if sign != "::=":
                raise _refuse(f"{self._name[:50]!r} stands where a rule should begin; write NAME ::= ...")
            self.rules[self._name] = self._choice()
            if self._peek() == ")":
                raise _refuse(f"the rule {self._name!r} closes a bracket that is not open")
        for name, node in self.rules.items():
            if missing := [each for each in _names(node) if each not in self.rules]:
                raise _refuse(f"the rule {name!r} uses {missing[0]!r}, which is not there")
        if "root" not in self.rules:
            raise _refuse("it has no rule 'root'")

    def _peek(self, ahead: int = 0) -> str:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else ""

    def _take(self) -> str:
        self._place += 1
        return self._peek(-1)

    def _choice(self) -> Node:
        ways = [self._sequence()]
        while self._peek() == "|":
            self._take()
            ways.append(self._sequence())
        return ways[0] if len(ways) == 1 else Node("or", tuple(ways))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (token := self._peek()) and token not in "|)" and self._peek(1) != "::=":
            if token[0] in "*+?{":
                if not parts:
                    raise _refuse(f"the rule {self._name!r} repeats nothing with {token!r}")
                parts[-1] = Node("many", (parts[-1],), times=_times(self._take()))
            else:
                parts.append(self._part())
        return parts[0] if len(parts) == 1 else Node("seq", tuple(parts))

    def _part(self) -> Node:
        token = self._take()
        if token == "(":
            inside = self._choice()
            if self._take() != ")":
                raise _refuse(f"the rule {self._name!r} does not close a bracket")
            return inside
        if token == ".":
            return Node("set", ranges=((0, _LAST),))
        if token[0] == '"':
            letters = [Node("set", ranges=((each, each),)) for each, _ in _letters(token[1:-1])]
            return letters[0] if len(letters) == 1 else Node("seq", tuple(letters))
        if token[0] == "[":
            return Node("set", ranges=_class(token[1:-1], self._name))
        if token == "::=":
            raise _refuse(f"the rule {self._name!r} has another '::='")
        return Node("rule", name=token)


def _times(token: str) -> tuple[int, int | None]:
    if token[0] != "{":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[token]
    least, comma, most = token[1:-1].replace(" ", "").partition(",")
    return int(least or 0), int(most) if most else None if comma else int(least or 0)


def _letters(text: str) -> list[tuple[int, bool]]:
    """Return the letters of a literal or a class, and whether each is written as it is."""
    found = []
    for two, four, eight, named, plain in _LETTER.findall(text):
        digits = two or four or eight
        found.append((int(digits, 16) if digits else ord(_NAMED.get(named, named) or plain), bool(plain)))
    return found


def _class(text: str, name: str) -> Ranges:
    letters = _letters(text)
    is_negated = letters[:1] == [(ord("^"), True)]
    letters = letters[is_negated:]
    ranges, place = [], 0
    while place < len(letters):
        first = last = letters[place][0]
        if letters[place + 1 : place + 2] == [(ord("-"), True)] and place + 2 < len(letters):
            last, place = letters[place + 2][0], place + 2
        if not first <= last <= _LAST:
            raise _refuse(f"a class of the rule {name!r} has a range whose end comes before its start")
        ranges.append((first, last))
        place += 1
    if not is_negated:
        return tuple(ranges)
    outside, start = [], 0
    for first, last in sorted(ranges):
        if first > start:
            outside.append((start, first - 1))
        start = max(start, last + 1)
    return (*outside, *([(start, _LAST)] if start <= _LAST else []))


def _names(node: Node) -> list[str]:
    return [node.name] if node.kind == "rule" else [name for part in node.parts for name in _names(part)]


class _Writer:
    """Writes rules as Lark: `T1` for terminals, `r1` for other rules."""

    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._number = {name: str(number) for number, name in enumerate(rules)}
        self._closed = dict[str, bool]()
        uses = {name: set(_names(node)) for name, node in rules.items()}
        for _ in rules:  # what uses nothing but what is known to end
            ends = {name for name, used in uses.items() if used <= self._closed.keys()}
            if ends == self._closed.keys():
                break
            self._closed = dict.fromkeys(ends, True)
        cuts = {0, _LAST + 1}
        waiting = [*rules.values()]
        while waiting:
            node = waiting.pop()
            waiting += node.parts
            cuts |= {cut for first, last in node.ranges for cut in (first, last + 1)}
        self._place = {cut: place for place, cut in enumerate(sorted(cuts))}
        self._known: dict[Node, _Facts] = {}
        self._apart: set[Node] = set()
        """Parts that are no terminals, since others may begin with the same letter."""
        self._lines: dict[str, str] = {}
        self._begun: dict[Node, int] = {}
        """What stands as a terminal -> the letters with which it begins."""

    def text(self) -> str:
        """Return the grammar."""
        if "root" in self._closed:
            return f"start: {self._terminal(Node('rule', name='root'))}\n" + "\n".join(self._lines.values())
        while True:
            self._lines, self._begun = {}, {}
            self._rule("root")
            clashes = {
                node
                for node, first in self._begun.items()
                if node.kind != "set"
                and any(first & other for each, other in self._begun.items() if each != node)
            }
            if not clashes:
                return "\n".join((f"start: r{self._number['root']}", *self._lines.values()))
            self._apart |= clashes

    def _rule(self, name: str) -> str:
        title = f"r{self._number[name]}"
        if title not in self._lines:
            self._lines[title] = ""
            self._lines[title] = f"{title}: {self._written(self._rules[name])}"
        return title

    def _written(self, node: Node) -> str:
        """Return a part of a rule that is no terminal."""
        if self._is_terminal(node):
            self._begun[node] = self._facts(node).first
            return self._terminal(node)
        if node.kind == "rule":
            return self._rule(node.name)
        if node.kind == "seq":
            # No rule is taken into one: it may stand alone elsewhere, and begins with the same letter there.
            own = list(takewhile(lambda part: part.kind != "rule", node.parts))
            heads = (Node("seq", tuple(own[:length])) for length in range(len(own), 1, -1))
            head = next((each for each in heads if self._is_terminal(each)), None)
            rest = node.parts if head is None else node.parts[len(head.parts) :]
            begun = [] if head is None else [self._written(head)]
            return " ".join((*begun, *map(self._written, rest))) or '""'
        return _joined(node, map(self._written, node.parts))

    def _is_terminal(self, node: Node) -> bool:
        if node in self._apart or not all(name in self._closed for name in _names(node)):
            return False
        facts = self._facts(node)
        return not (facts.is_empty or facts.after)

    def _terminal(self, node: Node) -> str:
        """Return what stands for a part that ends, in terminals and elsewhere."""
        title = f"T{self._number[node.name]}" if node.kind == "rule" else f"T_{len(self._lines)}"
        if node.kind == "rule" and title in self._lines:
            return title
        self._lines[title] = ""
        self._lines[title] = f"{title}: {self._pattern(self._rules[node.name] if node.name else node)}"
        return title

    def _pattern(self, node: Node) -> str:
        if node.kind == "rule":
            return self._terminal(node)
        if node.kind == "set":
            ends = "".join(rf"\u{{{first:x}}}-\u{{{last:x}}}" for first, last in node.ranges)
            return f"/[{ends}]/" if ends else "/[a&&b]/"
        return _joined(node, map(self._pattern, node.parts))

    def _facts(self, node: Node) -> _Facts:
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = self._found(node)
        return found

    def _found(self, node: Node) -> _Facts:
        if node.kind == "rule":
            return self._facts(self._rules[node.name])
        if node.kind == "set":
            bits = 0
            for first, last in node.ranges:
                bits |= (1 << self._place[last + 1]) - (1 << self._place[first])
            return _Facts(is_empty=False, first=bits, after=0, letters=bits)
        parts = [self._facts(part) for part in node.parts]
        if node.kind == "or":
            return reduce(_either, parts)
        if node.kind == "seq":
            return reduce(_both, parts, _Facts(is_empty=True, first=0, after=0, letters=0))
        (one,), (least, most) = parts, node.times
        after = _both(one, one).after | (one.first if most != least else 0)
        is_empty = least == 0 or one.is_empty
        return _Facts(is_empty, one.first, after | (one.first if is_empty else 0), one.letters)


def _both(a: _Facts, b: _Facts) -> _Facts:
    letters = a.letters | b.letters
    after = b.after | (a.after | b.first if b.is_empty else 0)
    return _Facts(
        a.is_empty and b.is_empty,
        a.first | (b.first if a.is_empty else 0),
        letters if a.after & b.first else after,
        letters,
    )


def _either(a: _Facts, b: _Facts) -> _Facts:
    letters = a.letters | b.letters
    after = a.after | b.after | (a.first | b.first if a.is_empty or b.is_empty else 0)
    return _Facts(
        a.is_empty or b.is_empty, a.first | b.first, letters if a.first & b.first else after, letters
    )


def _joined(node: Node, written: map[str]) -> str:
    """Return a part whose own parts are written."""
    if node.kind == "or":
        return f"({' | '.join(written)})"
    if node.kind == "seq":
        return f"({' '.join(written)})" if node.parts else '""'
    least, most = node.times
    return f"({next(written)}){{{least},{'' if most is None else most}}}"


def lark_of(text: str) -> str:
    """Return a grammar as Lark: GBNF, which has `::=`, is translated.

    Raises
    ------
    InvalidRequest : it is no GBNF, or too long.
    """
    check_size(text)
    if "::=" not in text:
        parts, end = list[str](), 0
        for start, after, schema in schemas_in(text):
            parts += (text[end:start], json.dumps(with_rust_patterns(schema), ensure_ascii=False))
            end = after
        return "".join((*parts, text[end:]))
    try:
        return _Writer(_Reader(text).rules).text()
    except RecursionError as error:
        why = "the grammar is not valid GBNF: it is nested too deep"
        raise InvalidRequest(why) from error


def renamed(text: str, name: str) -> str:
    """Return a Lark text whose rule `start` has another name, so that it may stand inside of another text.

    What is said to the library (`%llguidance`) is left out: only the whole text says it.
    """
    text = _OPTIONS.sub("", text)
    parts, end = list[str](), 0
    for found in _WORDS.finditer(text):
        if found.start() < end:
            continue  # inside of a schema
        parts.append(text[end : found.start()])
        end = found.end()
        word = found.group()
        if word.startswith("%json"):
            with suppress(ValueError):  # the library says what is wrong
                _, end = json.JSONDecoder().raw_decode(text, end)
                word = text[found.start() : end]
        parts.append(name if word == "start" else word)
    return "".join((*parts, text[end:]))


_OPTIONS = re.compile(r"%llguidance\s*\{[^}]*\}")
_WORDS = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|%json\s*|\b\w+\b')


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties that they name, and no others unless they say so.

    Members of an `allOf` stay open: together they name an object's properties.

    Raises
    ------
    TooComplex : the schema is too long or too deep.
    """
    check_schema(schema)
    return changed(schema, _closed, DATA | {"allOf"})


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    if "properties" in schema:
        schema.setdefault("additionalProperties", False)
    return schema
