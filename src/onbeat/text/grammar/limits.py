"""Fixed limits of grammars, held before anything is compiled; each names what is too much.

They keep out what the library's own limits do not see: chains of references that overflow its stack, numbers
that take it seconds. What passes is still tried in a process of its own (`guard`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

import orjson

from onbeat.core.errors import InvalidRequest

MOST_BYTES = 256 << 10
MOST_LEVELS = 64
MOST_PATTERNS = 200
MOST_PATTERN = 2048
MOST_CHAIN = 200
MOST_RULES = 1000
MOST_PROPERTIES = 2000
MOST_OPTIONAL = 250
MOST_VALUES = 10_000
MOST_TOGETHER = 8
LARGEST_MULTIPLE = 10_000

_JSON = re.compile(r"%json\s*")
_OPTIONS = re.compile(r"%llguidance\s*\{[^}]*\}")
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"i?')
_PATTERN = re.compile(r"/(?:\\.|[^/\\\n])+/")
_RULE = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)\s*(?:\[[^\]\n]*\]|\.-?\d+)*\s*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")


class TooComplex(InvalidRequest):
    """A grammar is beyond a limit."""

    def __init__(self, message: str) -> None:
        super().__init__(message, code="grammar_too_complex")


def check_size(text: str) -> None:
    """Refuse a text that is too long to be looked at.

    Raises
    ------
    TooComplex : it is.
    """
    _at_most(len(text), MOST_BYTES, "characters of text")  # without a copy
    _at_most(len(text.encode("utf-8", "surrogatepass")), MOST_BYTES, "bytes of text")


def check_schema(schema: Any) -> None:
    """Refuse a schema that is too long or too deep to become text, before it does.

    Raises
    ------
    TooComplex : it is.
    """
    try:
        _at_most(len(orjson.dumps(schema)), MOST_BYTES, "bytes of text")
    except orjson.JSONEncodeError as error:
        raise TooComplex(f"the schema is nested deeper than {MOST_LEVELS} levels; flatten it") from error


def check_limits(text: str) -> list[str]:
    """Refuse a Lark text, with the schemas in it, that is beyond a limit.

    Returns
    -------
    The last property that each object of the schemas names, at most `MOST_LEVELS` of them.

    Raises
    ------
    TooComplex : it is; the message names the limit.
    """
    check_size(text)
    counts, parts, end = _Counts(), list[str](), 0
    for start, after, schema in schemas_in(text):
        counts.add(schema)
        parts.append(text[end:start])
        end = after
    rest, num_texts = _QUOTED.subn('""', _OPTIONS.sub("", " ".join((*parts, text[end:]))))
    _at_most(counts.num_values + num_texts, MOST_VALUES, "values of enum, choices and texts")
    patterns = [*counts.patterns, *_PATTERN.findall(rest)]
    _at_most(len(patterns), MOST_PATTERNS, "patterns")
    _at_most(max(map(len, patterns), default=0), MOST_PATTERN, "characters of a pattern")
    _at_most(counts.num_properties, MOST_PROPERTIES, "properties")
    _check_rules(_PATTERN.sub("", rest))
    return counts.last_names[:MOST_LEVELS]


def _at_most(number: int, most: int, what: str) -> None:
    if number > most:
        raise TooComplex(f"the grammar has {number} {what}; at most {most} are taken. Make it simpler")


def schemas_in(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield where each schema of a Lark text begins and ends, and the schema.

    Raises
    ------
    TooComplex : it is too deep.
    """
    end, decoder = 0, json.JSONDecoder()
    for found in _JSON.finditer(text):
        if found.start() < end:
            continue  # inside of a schema
        try:
            schema, end = decoder.raw_decode(text, found.end())
        except RecursionError as error:
            raise TooComplex(f"the schema is nested deeper than {MOST_LEVELS} levels; flatten it") from error
        except ValueError:
            continue  # the library says what is wrong
        yield found.end(), end, schema


class _Counts:
    """What schemas hold."""

    def __init__(self) -> None:
        self.num_values = 0
        self.num_properties = 0
        self.patterns: list[str] = []
        self.last_names: list[str] = []

    def add(self, schema: Any) -> None:
        """Count what a schema holds."""
        level = [schema]
        for _ in range(MOST_LEVELS + 1):
            level = [inner for outer in level for inner in self._inside(outer)]
            if not level:
                break
        else:
            raise TooComplex(f"the schema is nested deeper than {MOST_LEVELS} levels; flatten it")
        if isinstance(schema, dict):
            _check_references(schema)

    def _inside(self, value: Any) -> Iterable[Any]:
        if isinstance(value, list):
            return [inner for inner in value if isinstance(inner, dict | list)]
        self._count(value) if isinstance(value, dict) else None
        return [inner for inner in value.values() if isinstance(inner, dict | list)] if value else ()

    def _count(self, schema: Mapping[str, Any]) -> None:
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            self.num_properties += len(properties)
            self.last_names += [*properties][-1:]
            names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
            _at_most(len(properties.keys() - names), MOST_OPTIONAL, "optional properties in one object")
        if isinstance(values := schema.get("enum"), list):
            self.num_values += len(values)
        if isinstance(pattern := schema.get("pattern"), str):
            self.patterns.append(pattern)
        if isinstance(patterns := schema.get("patternProperties"), dict):
            self.patterns += patterns
        _check_multiple(schema.get("multipleOf"))
        if isinstance(members := schema.get("allOf"), list):
            together = [schema, *(member for member in members if isinstance(member, dict))]
            _at_most(sum("pattern" in each for each in together), MOST_TOGETHER, "patterns in one allOf")
            _at_most(sum("multipleOf" in each for each in together), 1, "multipleOf in one allOf")


def _check_multiple(value: Any) -> None:
    """Refuse a number whose multiples take long to enforce: the time grows with it, as a whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    number = Decimal(str(value))
    exponent = number.as_tuple().exponent
    digits = int("".join(map(str, number.as_tuple().digits))) if isinstance(exponent, int) else 0
    whole = digits * 10 ** min(max(int(exponent), 0), 9)
    if whole > LARGEST_MULTIPLE:
        raise TooComplex(
            f"multipleOf is {value}; its digits as a whole number may be at most {LARGEST_MULTIPLE}. "
            "Choose a smaller one"
        )


def _check_references(schema: Mapping[str, Any]) -> None:
    """Refuse a schema whose `$ref` lead from one to the next for too long."""
    uses: dict[str, list[str]] = {"#": list(_references(schema, skip=("$defs", "definitions")))}
    for place in ("$defs", "definitions"):
        definitions = schema.get(place)
        if isinstance(definitions, dict):
            for name, definition in definitions.items():
                uses[f"#/{place}/{name}"] = list(_references(definition))
    _check_chain(uses, "#", "$ref")


def _references(schema: Any, skip: tuple[str, ...] = ()) -> Iterable[str]:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if isinstance(reference := value.get("$ref"), str):
                yield reference
            waiting += [inner for key, inner in value.items() if not (value is schema and key in skip)]


def _check_rules(text: str) -> None:
    """Refuse a Lark text with too many rules, or rules that use one another for too long a way."""
    found = list(_RULE.finditer(text))
    _at_most(len(found), MOST_RULES, "rules")
    names = {rule.group(1) for rule in found}
    uses: dict[str, list[str]] = {}
    ends = [*(rule.start() for rule in found), len(text)][1:]
    for rule, end in zip(found, ends, strict=True):
        body = _NAME.findall(text, rule.end(), end)
        uses.setdefault(rule.group(1), []).extend(name for name in body if name in names)
    if "start" in uses:
        _check_chain(uses, "start", "rules")


def _check_chain(uses: Mapping[str, list[str]], start: str, what: str) -> None:
    """Walk as a compiler does, each name once, and refuse a way that is too long."""
    seen = {start}
    way = [iter(uses.get(start, ()))]
    while way:
        name = next(way[-1], None)
        if name is None:
            way.pop()
        elif name not in seen:
            seen.add(name)
            way.append(iter(uses.get(name, ())))
            if len(way) > MOST_CHAIN:
                raise TooComplex(
                    f"{what} of the grammar lead from one to the next for more than {MOST_CHAIN} steps; "
                    "make the chain shorter"
                )
