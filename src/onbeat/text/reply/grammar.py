"""The grammar of an answer that must call tools, or call them by their schemas, in its family's own form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onbeat.core.errors import InvalidRequest
from onbeat.core.request import Grammar
from onbeat.text.grammar.source import JsonStyle, embedded_json, lark_grammar, lark_text
from onbeat.text.grammar.translate import closed, renamed
from onbeat.text.reply.body import to_json
from onbeat.text.reply.families import ReplyFamily
from onbeat.text.reply.parser import ReplyStyle
from onbeat.text.reply.xml_calls import merged, types_of

_COMMON = r"""
TEXT_: /(.|\n)+/
ANY_: /(.|\n)*/
SPACE_: /[ \t\r\n]{0,8}/
value_[lazy]: VALUE_ "\n</parameter>\n"
VALUE_: /(.|\n)*/ & ~/(.|\n)*(<\/parameter>|<parameter=|<\/function>)(.|\n)*/
"""
"""Any text, white space, and the value of a parameter with the tag behind it."""
_ANNOTATIONS = frozenset(("type", "title", "description", "default", "examples", "enum", "const"))
"""Keywords of a text that its form without quotes can keep to."""
_PLAIN_OBJECT = _ANNOTATIONS | {"properties", "required", "additionalProperties", "$defs", "definitions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedCalls:
    """The calls that an answer may have."""

    schemas: Mapping[str, Any]
    """Of each tool's arguments, by its name."""
    strict: frozenset[str]
    """Tools whose arguments keep to their schema in all that it says, or are refused."""
    is_required: bool
    """Whether it must have one or more."""
    is_single: bool
    """Whether it has no more than one."""


def answer_grammar(
    style: ReplyStyle, calls: WantedCalls | None, text: Grammar | None, *, opens_in_reasoning: bool
) -> Grammar:
    """Return the grammar of an answer: reasoning, if the model reasons, then calls or text.

    Parameters
    ----------
    style : `ReplyStyle.guided` of the model.
    calls : what may be called; None if nothing.
    text : what a text must match; None allows any.
    opens_in_reasoning : whether the prompt ends inside of reasoning.

    Raises
    ------
    InvalidRequest : the family's form cannot keep to a schema that is strict.
    """
    writer = _Writer(style)
    if text is not None:
        writer.rules.append(renamed(text.text, "given_"))
    if calls is None:
        writer.rules.append(f"answer_: {writer.text_opening} given_")
    else:
        writer.add_answer(calls, has_text=text is not None)
    writer.rules.append(f"start: {writer.thought(is_open=opens_in_reasoning)}answer_")
    return lark_grammar("\n".join((*writer.rules, _COMMON)))


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, style: ReplyStyle) -> None:
        self._style = style
        self.rules: list[str] = []
        opening = "" if style.family is None else style.family.text_opening
        self.text_opening = self._mark(opening) if opening else ""

    def thought(self, *, is_open: bool) -> str:
        """Return the reasoning that an answer begins with; only what the prompt has begun must come."""
        marks = self._style.reasoning
        if marks is None:
            return ""
        self.rules.append(self._up_to("thought_", marks.closing))
        return "thought_ SPACE_ " if is_open else f"({self._mark(marks.opening)} thought_ SPACE_)? "

    def add_answer(self, calls: WantedCalls, *, has_text: bool) -> None:
        """Add the rule of what comes behind reasoning."""
        family = self._style.family
        assert family is not None, "calls are read"
        opening, closing = family.marks[0] if family.marks else ("", "")
        names = list(calls.schemas)
        self.rules += [
            f"tool_{index}_: {self._tool(family, name, calls)}" for index, name in enumerate(names)
        ]
        self.rules.append("tool_: " + " | ".join(f"tool_{index}_" for index in range(len(names))))
        self.rules.append(f"region_: {self._region(family, closing, is_single=calls.is_single)}")
        begin = self._mark(opening) if opening else ""
        repeats = family.form in ("objects", "named", "tags") and not calls.is_single
        more = f"(SPACE_ {begin} region_)*" if repeats else ""
        self.rules.append(f"calls_: {begin} region_ {more}")
        if calls.is_required:
            self.rules.append("answer_: calls_")
        elif has_text:
            self.rules.append(f"answer_: calls_ | {self.text_opening} given_")
        elif self.text_opening:
            self.rules.append(f"answer_: calls_ | {self.text_opening} TEXT_?")
        elif not opening:
            first = "".join(rf"\{character}" for character in family.bare)
            self.rules.append(rf"answer_: calls_ | FREE_?{chr(10)}FREE_: /[^{first} \t\r\n](.|\n)*/")
        else:
            self.rules.append(self._up_to("until_", opening))
            self.rules.append("answer_: (until_ region_)* TEXT_?")

    def _up_to(self, rule: str, mark: str) -> str:
        """Return the rule of any text up to a mark, the mark included."""
        if mark.startswith(tuple(self._style.mark_ids)):
            return f"{rule}: TEXT_? {self._mark(mark)}"
        return f"{rule}[lazy]: ANY_ {lark_text(mark)}"

    def _mark(self, mark: str) -> str:
        ids = self._style.mark_ids
        parts = re.split(f"({'|'.join(map(re.escape, ids)) or '(?!)'})", mark)
        return " ".join(f"<[{ids[part]}]>" if part in ids else lark_text(part) for part in parts if part)

    def _region(self, family: ReplyFamily, closing: str, *, is_single: bool) -> str:
        """Return what stands between an opening mark and the end of a region, the closing mark included."""
        end = self._mark(closing) if closing else ""
        line = lark_text("\n")
        more = "" if is_single else f"({lark_text(', ')} tool_)*"
        match family.form:
            case "objects" | "tags":
                return f"{line} tool_ {line} {end}"
            case "array":
                return f'SPACE_ "[" tool_ {more} "]" {end}'
            case "apart":
                return "tool_" if is_single else f"tool_ ({lark_text('; ')} tool_)*"
            case "any":
                return "tool_" if is_single else f'tool_ | "[" tool_ {more} "]"'
            case _:
                return "tool_"

    def _tool(self, family: ReplyFamily, name: str, calls: WantedCalls) -> str:
        """Return the rule of one tool's call."""
        schema, is_strict = calls.schemas[name], name in calls.strict
        schema = closed({"type": "object", **schema}) if is_strict else {"type": "object", **schema}
        if family.form == "tags":
            return self._tags(name, schema, is_strict=is_strict)
        arguments = embedded_json(schema, JsonStyle(is_lenient=not is_strict))
        if family.form == "messages":
            return f"{lark_text(name)} {self._mark(' <|constrain|>json<|message|>')} {arguments}"
        if family.form == "named":
            return f"{lark_text(name)} {self._mark('[ARGS]')} {arguments}"
        return f'{lark_text(f"""{{"name": {to_json(name)}, "{family.arguments_key}": """)} {arguments} "}}"'

    def _tags(self, name: str, schema: Mapping[str, Any], *, is_strict: bool) -> str:
        """Return the rule of a call in tags, which hold properties in the order of the schema."""
        whole = merged(schema, schema)
        if is_strict and (more := whole.keys() - _PLAIN_OBJECT):
            raise _not_kept(name, min(more))
        properties, required = whole.get("properties") or {}, whole.get("required") or []
        if not (isinstance(properties, dict) and isinstance(required, list)):
            raise InvalidRequest(
                f"the schema of the function {name!r} is not valid: properties must be an object, and "
                "required an array",
                param="tools",
            )
        names = {each for each in required if isinstance(each, str)}
        parts = [lark_text(f"<function={name}>\n")]
        for key, value in properties.items():
            if not set(key).isdisjoint("<>\n"):
                raise _not_kept(name, key)
            parameter = " ".join(
                (
                    lark_text(f"<parameter={key}>\n"),
                    _tag_value(name, value, schema, is_strict=is_strict),
                )
            )
            parts.append(parameter if key in names else f"({parameter})?")
        return " ".join((*parts, lark_text("</function>")))


def _tag_value(name: str, value: Any, schema: Mapping[str, Any], *, is_strict: bool) -> str:
    """Return a parameter's value, a text without quotes, and the tag behind it."""
    end = lark_text("\n</parameter>\n")
    about = merged(value, schema)
    if "string" not in types_of(value, schema):
        own = about | {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        return f"{embedded_json(own, JsonStyle(is_lenient=not is_strict))} {end}"
    if is_strict and (more := about.keys() - _ANNOTATIONS):
        raise _not_kept(name, min(more))
    words = about.get("enum", [about["const"]] if "const" in about else None)
    if not isinstance(words, list) or not words:
        return "value_"
    texts = [word if isinstance(word, str) else json.dumps(word) for word in words]
    return f"({' | '.join(map(lark_text, texts))}) {end}"


def _not_kept(name: str, what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the function {name!r} is strict and its schema has {what!r}, which this model's form of calls "
        "(tags, texts without quotes) cannot be held to; leave it out, or strict",
        param="tools",
        code="unsupported_schema",
    )
