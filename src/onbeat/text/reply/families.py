"""How the model families write calls of tools and reasoning: a row for each, chosen by the chat template."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from onbeat.core.errors import ConfigError
from onbeat.text.reply.body import Body
from onbeat.text.reply.brace_calls import QUOTE, BraceCalls
from onbeat.text.reply.calls import Calls
from onbeat.text.reply.json_bodies import JsonCalls, NamedJson
from onbeat.text.reply.python_calls import PythonCalls
from onbeat.text.reply.xml_calls import XmlParams

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
    new_body: Callable[[Calls], Body] | None = None
    """Reads a region of calls; None where messages do without (`HarmonyParser`)."""
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


HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
_BARE_JSON = partial(JsonCalls, needs_arguments=True)
_MARKED, _FUNCTION = (("<tool_call>", "</tool_call>"),), ("<function=",)
_TAGGED = (*_MARKED, (*_FUNCTION, "</tool_call>"))

FAMILIES = {
    family.name: family
    for family in (
        ReplyFamily(name="hermes", marks=_MARKED, new_body=JsonCalls),
        ReplyFamily(name="qwen3-xml", marks=_TAGGED, inner_marks=_FUNCTION, new_body=XmlParams, form="tags"),
        ReplyFamily(
            name="llama3-json",
            marks=(("<|python_tag|>", ""), ("<|python_start|>", "<|python_end|>")),
            new_body=_BARE_JSON,
            bare="{",
            arguments_key="parameters",
            form="apart",
        ),
        ReplyFamily(
            name="pythonic",
            marks=(("<|python_start|>", "<|python_end|>"), ("<|python_tag|>", "")),
            new_body=PythonCalls,
            bare="[",
            form="python",
        ),
        ReplyFamily(
            name="mistral",
            marks=(("[TOOL_CALLS]", ""),),
            new_body=JsonCalls,
            has_short_ids=True,
            form="array",
        ),
        ReplyFamily(
            name="mistral-args",
            marks=(("[TOOL_CALLS]", ""),),
            new_body=NamedJson,
            inner_marks=("[ARGS]", "[CALL_ID]"),
            has_short_ids=True,
            form="named",
        ),
        ReplyFamily(
            name="phi",
            marks=(("<|tool_call|>", "<|/tool_call|>"), ("functools", "")),
            new_body=JsonCalls,
            form="array",
        ),
        ReplyFamily(
            name="granite",
            marks=(("<|tool_call|>", ""), ("<tool_call>", "</tool_call>")),
            new_body=JsonCalls,
            form="array",
        ),
        ReplyFamily(
            name="harmony",
            marks=(("<|channel|>commentary to=functions.", ""),),
            inner_marks=HARMONY_MARKS,
            form="messages",
            text_opening="<|channel|>final<|message|>",
        ),
        ReplyFamily(
            name="gemma4",
            marks=(("<|tool_call>", "<tool_call|>"),),
            new_body=BraceCalls,
            inner_marks=(QUOTE,),
            form="braces",
        ),
        ReplyFamily(name="json", marks=(("```json", "```"),), new_body=_BARE_JSON, bare="{[", form="any"),
    )
}

REASONING = {
    "think": ReasoningMarks("<think>", "</think>"),
    "mistral": ReasoningMarks("[THINK]", "[/THINK]"),
    "harmony": ReasoningMarks("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", HARMONY_MARKS),
    "gemma4": ReasoningMarks("<|channel>", "<channel|>", label="thought\n"),
}

_ALIASES = {
    **dict.fromkeys(("qwen3_xml", "qwen3_coder"), "qwen3-xml"),
    **dict.fromkeys(("llama3_json", "llama4_json"), "llama3-json"),
    "llama4_pythonic": "pythonic",
    **dict.fromkeys(("phi4_mini_json", "phi4"), "phi"),
    "granite4": "hermes",
    "qwen3": "hermes",
    "openai": "harmony",
}
"""vLLM's names."""
_REASONING_ALIASES = {
    **dict.fromkeys(("deepseek_r1", "qwen3", "granite", "hermes"), "think"),
    "openai_gptoss": "harmony",
}

_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>", QUOTE)),
    ("qwen3-xml", ("<function=",)),
    ("mistral-args", ("[TOOL_CALLS]", "[ARGS]")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("hermes", ("<tool_call>", "arguments")),
    ("phi", ("functools",)),
    ("phi", ("<|/tool_call|>",)),
    ("granite", ("<|tool_call|>",)),
    ("pythonic", ("[func_name1(",)),
    ("llama3-json", ("<|python_tag|>",)),
    ("llama3-json", ("ipython", '"parameters"')),
)
"""What a template holds of a family whose models it is for; the first that fits counts."""


def family_named(name: str) -> ReplyFamily:
    """Return the family of a name, or of vLLM's name for it.

    Raises
    ------
    ConfigError : there is none.
    """
    known = FAMILIES.get(_ALIASES.get(name, name))
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
    known = REASONING.get(_REASONING_ALIASES.get(name, name))
    if known is None:
        raise ConfigError(
            f"the reasoning parser {name!r} is not known; give auto, none, or one of {', '.join(REASONING)}"
        )
    return known


def family_of(template: str) -> ReplyFamily:
    """Return the family of the models that a chat template is for."""
    for name, signs in _SIGNS:
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
