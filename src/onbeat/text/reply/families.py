"""How the model families write calls of tools and reasoning: `data/replies.yaml`, by the chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from onbeat.core.errors import ConfigError
from onbeat.files import packaged
from onbeat.text.reply.body import Body
from onbeat.text.reply.brace_calls import BraceCalls
from onbeat.text.reply.calls import Calls
from onbeat.text.reply.json_bodies import JsonCalls, NamedJson
from onbeat.text.reply.python_calls import PythonCalls
from onbeat.text.reply.xml_calls import XmlParams
from onbeat.typed import Table

Form = Literal["objects", "array", "apart", "any", "named", "tags", "python", "braces", "messages"]
"""How calls are written: each an object between marks, or in an array between marks; bare objects apart by
semicolons, or bare in any way; a name and an object; tags; Python; braces and quotes of their own (Gemma 4);
or messages to functions (Harmony)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFamily:
    """How the models of a family call tools."""

    name: str
    marks: tuple[tuple[str, str], ...]
    """What opens a region of calls, and what closes it, empty where nothing does; those it prefers first."""
    bare: str = ""
    """Characters with which an answer begins that is calls without a mark."""
    inner_marks: tuple[str, ...] = ()
    """Special tokens that stand inside of calls, and what begins a call whose opening mark is missing."""
    has_short_ids: bool = False
    """Whether its template takes only ids of nine letters and digits."""
    arguments_key: str = "arguments"
    form: Form = "objects"
    text_opening: str = ""
    """What stands before an answer's text."""

    @property
    def is_json(self) -> bool:
        """Whether a call may be an object with a name and arguments."""
        return self.form in ("objects", "array", "apart", "any")

    @property
    def guided(self) -> ReplyFamily:
        """The family as answers are read that keep to a grammar: they have calls in one way alone."""
        if self.form in ("python", "braces"):
            return FAMILIES["json"].guided
        return replace(self, marks=() if self.bare else self.marks[:1])


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands around reasoning."""

    opening: str
    closing: str
    inner_marks: tuple[str, ...] = ()
    """Special tokens that stand in them, or between them and an answer."""
    label: str = ""
    """What stands behind the opening mark and is no reasoning."""


_BARE_JSON = partial(JsonCalls, needs_arguments=True)
BODIES: Mapping[Form, Callable[[Calls], Body]] = {
    **dict.fromkeys(("objects", "array"), JsonCalls),
    **dict.fromkeys(("apart", "any"), _BARE_JSON),
    "named": NamedJson,
    "tags": XmlParams,
    "python": PythonCalls,
    "braces": BraceCalls,
}
"""What reads calls of a form; messages do without (`HarmonyParser`)."""


class _Table(Table):
    families: list[ReplyFamily]
    reasoning: dict[str, ReasoningMarks]
    aliases: dict[str, str]
    reasoning_aliases: dict[str, str]
    signs: list[tuple[str, tuple[str, ...]]]


_TABLE = packaged(_Table, "onbeat.text", "replies.yaml")
FAMILIES = {family.name: family for family in _TABLE.families}
REASONING = _TABLE.reasoning
HARMONY_MARKS = FAMILIES["harmony"].inner_marks


def family_named(name: str) -> ReplyFamily:
    """Return the family of a name, or of vLLM's name for it.

    Raises
    ------
    ConfigError : there is none.
    """
    known = FAMILIES.get(_TABLE.aliases.get(name, name))
    if known is None:
        raise ConfigError(
            f"the tool call parser {name!r} is not known; give auto, none, or one of {', '.join(FAMILIES)}"
        )
    return known


def reasoning_named(name: str) -> ReasoningMarks:
    """Return the marks around reasoning of a name, or of vLLM's name for it.

    Raises
    ------
    ConfigError : there are none.
    """
    known = REASONING.get(_TABLE.reasoning_aliases.get(name, name))
    if known is None:
        raise ConfigError(
            f"the reasoning parser {name!r} is not known; give auto, none, or one of {', '.join(REASONING)}"
        )
    return known


def family_of(template: str) -> ReplyFamily:
    """Return the family of the models that a chat template is for."""
    for name, signs in _TABLE.signs:
        if all(sign in template for sign in signs):
            return FAMILIES[name]
    return FAMILIES["json"]


def reasoning_of(template: str, has_token: Callable[[str], bool]) -> ReasoningMarks | None:
    """Return the marks around the reasoning of a model, if its template or its vocabulary has them.

    Parameters
    ----------
    has_token : says whether a text is one token.
    """
    if family_of(template).name == "harmony":
        return REASONING["harmony"]
    for marks in REASONING.values():
        if marks.closing in template or (has_token(marks.opening) and has_token(marks.closing)):
            return marks
    return None
