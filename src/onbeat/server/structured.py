"""What an answer must match: fields by the names of several servers, and the grammar that can be enforced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import orjson
from pydantic import BaseModel, Field

from onbeat.core.errors import InvalidRequest, RequestRejected
from onbeat.core.request import Grammar
from onbeat.metrics.counts import GrammarCounts
from onbeat.server.body import JsonReader
from onbeat.server.errors import ApiError
from onbeat.server.fair_threads import MOST_SHORT_WORK, FairThreads
from onbeat.server.fields import Closed, Flag
from onbeat.server.middleware import HttpContext
from onbeat.text.grammar import source
from onbeat.text.grammar.guard import GrammarGuard
from onbeat.text.grammar.limits import MOST_LEVELS, TooComplex, check_size
from onbeat.text.grammar.translate import closed, lark_of

MOST_CHOICES = 10_000

JsonSchema = dict[str, Any] | bool
SchemaOrText = JsonSchema | str
Choices = Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)]

_ANY_OBJECT: source.Schema = {"type": "object"}


class JsonSchemaFormat(Closed):
    """A named schema of OpenAI's `response_format`."""

    name: str | None = None
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: Flag | None = None
    """True refuses what cannot be enforced, and closes objects that do not say otherwise."""


class ResponseFormat(Closed):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(Closed):
    """vLLM's `structured_outputs`: one constraint, and how JSON is written."""

    json_: SchemaOrText | None = Field(None, alias="json")
    json_object: Flag | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: Flag | None = None
    disable_additional_properties: Flag | None = None
    backend: str | None = None
    """Without effect, as `disable_fallback`: there is one way to enforce a grammar."""
    disable_fallback: Flag | None = None


class StructureFields(BaseModel):
    """The fields of a body that say what the answer must match; at most one of them may.

    From `guided_json` on they are vLLM's older names.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None


class Constraint(NamedTuple):
    """What an answer must match."""

    field: str
    """Where the caller says so."""
    make: Callable[[], Grammar]
    parts: Sequence[Constraint] = ()
    """What it is made of: where it cannot be enforced, one of them is at fault."""
    whose: str = ""
    """What of the field a part is."""


def grammar_of(body: StructureFields) -> Constraint | None:
    """Return what the answer must match, by the one field that says so; None where any text will do.

    Raises
    ------
    InvalidRequest : several fields say so, or one of them wrongly.
    """
    older = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
    style = source.JsonStyle(white_space=body.guided_whitespace_pattern or source.WHITE_SPACE)
    found = [
        *_of_response_format(body.response_format),
        *_of_structured_outputs(body),
        *_named({name: getattr(body, name) for name in older}, "", style),
    ]
    if len(found) > 1:
        first, second, *_ = found
        raise InvalidRequest(
            f"{{field}} and {second.field} both constrain the answer; send one of them",
            param=second.field,
            field=first.field,
        )
    return found[0] if found else None


def _of_response_format(given: ResponseFormat | None) -> Iterator[Constraint]:
    if given is None or given.type == "text":
        return
    name = "response_format"
    if given.type == "json_object":
        yield Constraint(name, partial(source.json_grammar, _ANY_OBJECT, source.JsonStyle(is_lenient=True)))
    else:
        asked = given.json_schema
        if asked is None:
            raise InvalidRequest(
                "{field} is missing, but type is 'json_schema'",
                param=f"{name}.json_schema",
                code="missing_required_parameter",
            )
        style = source.JsonStyle(is_lenient=not asked.strict)
        make = partial(_of_schema, asked.schema_, style, is_closed=bool(asked.strict))
        yield Constraint(f"{name}.json_schema.schema", make)


def _of_structured_outputs(body: StructureFields) -> Iterator[Constraint]:
    given, name = body.structured_outputs, "structured_outputs"
    if given is None:
        return
    white_space = None if given.disable_any_whitespace else given.whitespace_pattern or source.WHITE_SPACE
    stated = {
        "json": given.json_,
        "json_object": given.json_object or None,
        **{each: getattr(given, each) for each in ("regex", "choice", "grammar")},
    }
    style, is_closed = source.JsonStyle(white_space=white_space), bool(given.disable_additional_properties)
    found = list(_named(stated, f"{name}.", style, is_closed=is_closed))
    if not found:
        raise InvalidRequest(
            f"{name} names no constraint; send json, json_object, regex, choice or grammar",
            param=name,
        )
    yield from found


def _named(
    stated: Mapping[str, Any], where: str, style: source.JsonStyle, *, is_closed: bool = False
) -> Iterator[Constraint]:
    """Yield what fields state, each by its name; null and an empty text state nothing."""
    for name, value in stated.items():
        if value is None or value == "":
            continue
        match name.removeprefix("guided_"):
            case "json":
                make = partial(_of_schema, value, style, is_closed=is_closed)
            case "json_object":
                make = partial(source.json_grammar, _ANY_OBJECT, style)
            case "regex":
                make = partial(source.regex_grammar, value)
            case "choice":
                make = partial(source.choice_grammar, value)
            case _:
                make = partial(_of_text, value)
        yield Constraint(where + name, make)


def _of_schema(given: SchemaOrText | source.Schema, style: source.JsonStyle, *, is_closed: bool) -> Grammar:
    schema = _parsed(given) if isinstance(given, str) else given
    if not isinstance(schema, dict | bool):
        raise InvalidRequest("it is no JSON schema; it must be an object")
    return source.json_grammar(closed(schema) if is_closed else schema, style)


def _of_text(text: str) -> Grammar:
    return source.lark_grammar(lark_of(text))


def _parsed(text: str) -> Any:
    """Return the value of JSON that stands in a text; takes long for a long one.

    Raises
    ------
    InvalidRequest : it is not valid, too long, or holds too much.
    """
    check_size(text)
    try:
        return JsonReader("its JSON").read(text)
    except ApiError as error:
        raise TooComplex(str(error)) from error
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"it is not valid JSON: {error}") from error


class GrammarChecks:
    """Takes grammars from bodies, and refuses those that cannot be enforced.

    Parameters
    ----------
    guard : tries them.
    counts : told of refusals.
    is_needed : whether the model writes answers, so that a grammar may come.
    """

    def __init__(self, guard: GrammarGuard, counts: GrammarCounts, *, is_needed: bool = True) -> None:
        self._guard = guard
        self._counts = counts
        self._is_needed = is_needed
        # One process tries, so one thread waits for it; grammars that are known do not.
        self._threads = FairThreads("onbeat-grammar", num_threads=1, num_short=1)

    async def warm_up(self) -> None:
        """Start the process that tries grammars, so that the first one does not wait for it."""
        if self._is_needed:
            await self._threads.run("", MOST_SHORT_WORK + 1, self._guard.warm_up)

    def close(self) -> None:
        """Let go of threads and process."""
        self._threads.close()
        self._guard.close()

    async def take(self, constraint: Constraint | None, context: HttpContext) -> None:
        """Give a request's context what its answer must match, and name the keywords that are ignored.

        Raises
        ------
        InvalidRequest : it cannot be enforced.
        """
        if constraint is None:
            return
        try:
            await self._take(constraint, context)
        except InvalidRequest as error:
            self._counts.refuse(error.code)
            for part in constraint.parts:
                await self._take(part, context)
            raise

    async def _take(self, constraint: Constraint, context: HttpContext) -> None:
        caller, field, where = context.caller, constraint.field, f"{{field}}{constraint.whose}"
        try:
            grammar = await self._threads.run(caller, 1, constraint.make)
        except (RecursionError, RequestRejected) as error:
            deep = TooComplex(f"the schema is nested deeper than {MOST_LEVELS} levels; flatten it")
            known = error if isinstance(error, RequestRejected) else deep
            raise InvalidRequest(f"{where}: {known}", param=field, code=known.code) from error
        verdict = self._guard.known(grammar)
        if verdict is None:
            size = MOST_SHORT_WORK + len(grammar.text)
            verdict = await self._threads.run(caller, size, lambda: self._guard.check(grammar))
        if verdict.problem is not None:
            raise InvalidRequest(f"{where}: {verdict.problem}", param=field, code=verdict.code)
        context.ignored_fields += [f"{field}.{keyword}" for keyword in verdict.ignored]
        context.grammar = replace(grammar, field=field, seconds=verdict.seconds)
