"""Which fields of a request are honoured, which are harmless, which are refused, and which are ignored.

A field of OpenAI's, Anthropic's or vLLM's API that cannot change the output is accepted and dropped. One that
changes it, and that onbeat lacks, is refused by name unless it has the value that asks for nothing. Any other
field is ignored, and named in the answer's headers: clients send what other servers understand. But one that
resembles an honoured field is a slip of the pen: dropped, a misspelt `temperature` would change every answer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from onbeat.core.errors import InvalidRequest, first_of, quoted
from onbeat.files import packaged
from onbeat.server.errors import unsupported
from onbeat.server.server_config import MAX_QUOTED
from onbeat.typed import Table


def without_effect() -> dict[str, Any]:
    """Return the description of a field that is taken with any value."""
    return {"description": "Accepted, without effect"}


class _Lacked(Table):
    fields: str
    no_ops: list[Any]


class _OthersFields(Table):
    """Fields of other APIs, and of this one where a body does not honour them."""

    harmless: str
    lacked: list[_Lacked]
    instead: dict[str, str]
    no_slips: str
    inside_slo: dict[str, str]


_OTHERS = packaged(_OthersFields, "onbeat.server", "fields.yaml")

HARMLESS = frozenset(_OTHERS.harmless.split())
"""Accepted with any value by bodies that do not honour them: they change nothing about the text."""

NO_OP_VALUES: Mapping[str, Sequence[Any]] = {
    name: each.no_ops for each in _OTHERS.lacked for name in each.fields.split()
}
"""Fields of OpenAI, Anthropic and vLLM that onbeat lacks, with the values that ask for nothing."""

INSTEAD = _OTHERS.instead
"""What does the same here, or most of it."""

_NO_SLIPS = frozenset(_OTHERS.no_slips.split())
"""Fields of other servers that resemble honoured ones."""

_INSIDE_SLO = _OTHERS.inside_slo
"""Names of objectives outside of `slo`, and what they mean."""

_LIKENESS = 0.8
"""From here on two names differ by a slip of the pen. `cache_prompt` and `cache_salt` are at 0.64,
`max_new_tokens` and `max_tokens` at 0.83."""

_MOST_UNKNOWN = 32
"""Unknown names in one place of a request: each is compared with all known ones, and named in a header."""


class _AlsoText:
    """Lets a number or a boolean be written as text, as pydantic does unless it is strict; no other type.

    Parameters
    ----------
    pattern : of the texts that are taken.
    read : makes a value of one.
    """

    def __init__(self, pattern: str, read: Callable[[str], object]) -> None:
        self._pattern = re.compile(pattern)
        self._read = read

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            return self._read(value) if self._pattern.fullmatch(value) else value
        # some languages have no integers: 5.0; above, a float may stand for one that it cannot hold
        is_whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        return int(value) if is_whole and self._read is int else value  # type: ignore[call-overload]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return BeforeValidator(self._value).__get_pydantic_core_schema__(source, handler)

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> Any:
        text = {"type": "string", "pattern": f"^({self._pattern.pattern})$"}
        return {"anyOf": [handler(schema), text]}


WHOLE = _AlsoText(r"[+-]?[0-9]{1,19}", int)
"""Of integers, which may be written as 5.0 or "5"."""
NUMBER = _AlsoText(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,2})?", float)
"""Of other numbers, which may be written as "0.5"."""
Flag = Annotated[bool, _AlsoText("[Tt]rue|[Ff]alse|TRUE|FALSE|[01]", lambda text: text[0] in "tT1")]
"""A boolean, which may be written as "true"."""


def check_fields(
    body: Mapping[str, Any], honoured: Collection[str], unused: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """Return the honoured fields of a body, and the names of those that are ignored.

    Parameters
    ----------
    body : the parsed JSON object.
    honoured : fields that the endpoint understands.
    unused : fields that it knows and does not need; dropped.

    Raises
    ------
    InvalidRequest : a field is misspelt, or asks for something that onbeat lacks.
    """
    kept: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in body.items():
        if name in honoured:
            kept[name] = value
        elif name in unused:
            pass
        elif name in NO_OP_VALUES:
            if name != "tools" or body.get("tool_choice") != "none":
                _check_no_op(name, value, honoured)
        elif name not in HARMLESS:
            unknown.append(name)
    return kept, ignorable(unknown, honoured)


def ignorable(unknown: Collection[str], honoured: Collection[str], *, where: str = "") -> list[str]:
    """Return the paths of unknown fields, all of which may be ignored.

    Parameters
    ----------
    unknown : names that are not honoured, each once.
    honoured : names that are, in the same place.
    where : the path of that place, such as `messages[].`.

    Raises
    ------
    InvalidRequest : a name resembles an honoured one, or there are too many.
    """
    if len(unknown) > _MOST_UNKNOWN:
        raise InvalidRequest(
            f"{len(unknown)} fields are unknown{' in {field}' if where else ''}; at most "
            f"{_MOST_UNKNOWN} are ignored. Leave them out",
            param=where[:-1] or None,
            code="unknown_parameter",
        )
    for name in unknown:
        if name in _NO_SLIPS:
            continue
        meant = _INSIDE_SLO.get(name) if "slo" in honoured else None
        if near := meant or near_match(name.lower(), honoured, likeness=_LIKENESS):
            path = (where + name)[:MAX_QUOTED]
            raise InvalidRequest(
                f"unknown field '{{field}}'; did you mean {near!r}?", param=path, code="unknown_parameter"
            )
    return [(where + name)[:MAX_QUOTED] for name in unknown]


def refuse_misplaced(body: Mapping[str, Any]) -> None:
    """Refuse an objective that stands outside of `slo`, where no server would look at it.

    Raises
    ------
    InvalidRequest : there is one.
    """
    ignorable(body.keys() & _INSIDE_SLO.keys(), ("slo",))


def _check_no_op(name: str, value: object, honoured: Collection[str]) -> None:
    # by type as well: 1 == True in Python
    if not any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in NO_OP_VALUES[name]
    ):
        cure = f"send {INSTEAD[name]}" if name in INSTEAD else "leave it out"
        if name in ("prompt", "messages") and "input" in honoured:
            cure = "send input"
        raise unsupported(f"{name} is not supported here; {cure}", name)


def near_match(name: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the known name that was probably meant. Of a long name only the start is compared."""
    start = name[:MAX_QUOTED]
    return next(iter(difflib.get_close_matches(start, list(known), n=1, cutoff=likeness)), None)


class _Noted(NamedTuple):
    """What a validation notes of fields that are not known."""

    ignorable: dict[tuple[str, tuple[str, ...]], dict[str, None]]
    """Place of objects and what they may have -> names."""
    cures: dict[str, str]
    """Name -> what was meant by it, where it must not be."""


class Closed(BaseModel):
    """An object of a body that has the fields which it declares and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_others(cls, value: Any, info: ValidationInfo) -> Any:
        """Keep one field that is not known, as each would make an error, and note what was meant by it."""
        known = [field.alias or name for name, field in cls.model_fields.items()]
        other = next((key for key in value if key not in known), None) if isinstance(value, dict) else None
        if other is None:
            return value
        near = near_match(other, known)
        others = ", ".join(sorted(known)) or "none"
        assert isinstance(info.context, _Noted), "`validated` gives it"
        info.context.cures[other] = f"did you mean {near!r}?" if near else f"known are {others}"
        return {name: value[name] for name in (*known, other) if name in value}


class Open(BaseModel):
    """An object of a body whose other fields are ignored, and named in the answer's headers."""

    model_config = ConfigDict(extra="allow", strict=True)

    place: ClassVar[str]
    """The path of such objects, such as `messages[].`."""

    @model_validator(mode="before")
    @classmethod
    def _note_others(cls, value: Any, info: ValidationInfo) -> Any:
        """Note them before the others are checked: where one of these is missing, it may be meant."""
        known = cls.model_fields
        if isinstance(value, dict) and (others := [name for name in value if name not in known]):
            note_unknown(info, cls.place, known, others)
        return value


def note_unknown(info: ValidationInfo, place: str, known: Collection[str], names: Iterable[str]) -> None:
    """Note the names of fields that are to be ignored, each once: all those of one place are judged together.

    Parameters
    ----------
    info : of a validation by `validated`.
    place : the path of the objects that have them.
    known : the fields that such objects are known to have.
    """
    assert isinstance(info.context, _Noted), "`validated` gives it"
    info.context.ignorable.setdefault((place, tuple(known)), {}).update(dict.fromkeys(names))


_Model = TypeVar("_Model", bound=BaseModel)

_JSON_WORDS = {
    "bool_type": "it should be true or false",
    "dict_type": "it should be an object",
    "model_type": "it should be an object",
    "list_type": "it should be an array",
}
"""Types as a caller knows them, where pydantic speaks of dictionaries, lists and our own classes."""


def validated(model: type[_Model], fields: dict[str, Any], ignored: list[str]) -> _Model:
    """Return the fields of an object as a checked model.

    Parameters
    ----------
    ignored : names of fields that are ignored; gets those that the model ignores inside of objects.

    Raises
    ------
    InvalidRequest : a field is missing, misspelt or wrong.
    """
    noted, failure = _Noted({}, {}), None
    try:
        checked = model.model_validate(fields, context=noted)
    except ValidationError as error:
        failure = error
    for (place, known), names in noted.ignorable.items():
        ignored += ignorable(names, known, where=place)
    if failure is not None:
        raise _first_error(failure, noted.cures, ignored) from failure
    return checked


def only_one(body: BaseModel, names: Sequence[str], ignored: Sequence[str]) -> str:
    """Return which of some fields a body has.

    Parameters
    ----------
    ignored : names of fields of the request that are ignored.

    Raises
    ------
    InvalidRequest : it has none of them, or several.
    """
    given = [name for name in names if getattr(body, name) is not None]
    cure = f"; send one of {', '.join(names)}"
    if not given:
        raise _missing(names[0], cure, ignored)
    if len(given) > 1:
        raise InvalidRequest(f"{' and '.join(given)} are given{cure}", param=given[0])
    return given[0]


def _missing(field: str, cure: str, ignored: Sequence[str]) -> InvalidRequest:
    """Return the error that also names the fields which nobody knows: one of them may be meant."""
    unknown = f"; unknown fields: {first_of(ignored)}" if ignored else ""
    message = f"{{field}} is missing{cure}{unknown}"
    return InvalidRequest(message, param=field, code="missing_required_parameter")


def _first_error(error: ValidationError, cures: Mapping[str, str], ignored: Sequence[str]) -> InvalidRequest:
    first, *others = _of_meant_member(error.errors(include_url=False))
    if first["type"] == "missing":  # a field beside it that is not known may be meant for it
        unknown = [each for each in others if each["type"] == "extra_forbidden"]
        first = next((each for each in unknown if each["loc"][:-1] == first["loc"][:-1]), first)
    location = [part[:MAX_QUOTED] if isinstance(part, str) else part for part in first["loc"]]
    param, field = _param(location), _dotted(location)
    if first["type"] == "missing":
        return _missing(field, "", ignored)
    if first["type"] == "extra_forbidden":
        name, cure = field[:MAX_QUOTED], cures[first["loc"][-1]]
        return InvalidRequest(f"unknown field '{{field}}'; {cure}", param=name, code="unknown_parameter")
    wrong = partial(InvalidRequest, param=param, field=field)
    if first["type"] == "value_error":
        return wrong(str(first["ctx"]["error"]))
    given = first["input"]  # an integer that JSON's reader could only keep as a float
    if first["type"] == "int_type" and isinstance(given, float) and abs(given) >= 2**63:
        return wrong("{field} is a number of more than 64 bits; send a smaller one")
    causes = [part for part in (first, *others) if part["loc"][:1] == first["loc"][:1]]
    told = [cause for cause in causes if cause["type"] not in ("missing", "extra_forbidden")]
    reasons = [_JSON_WORDS.get(cause["type"], cause["msg"]) for cause in told]
    reason = re.sub(r"\b[A-Z][a-z]+ should", "it should", " or ".join(dict.fromkeys(reasons)))
    reason = reason.replace(" after validation", "")
    return wrong(f"{{field}} is {quoted(first['input'])}; {reason}")


def _of_meant_member(errors: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the errors of the one member of a union that is meant, if one is: what is wrong is inside of it.

    An object is meant for a member unless that has another `type`. Where none is meant, all errors are told.
    """
    *start, last = errors[0]["loc"]
    place = len(start)
    if isinstance(errors[0]["input"], dict | list) and not _is_field(last):
        inside: dict[int | str, list[Mapping[str, Any]]] = {}
        for each in errors:
            *of_field, member = each["loc"][: place + 1] or ("",)
            if of_field == start and (rest := each["loc"][place + 1 :]):
                inside.setdefault(member, []).append({**each, "loc": (*start, *rest)})
        meant = [own for own in inside.values() if all(each["loc"][place:] != ("type",) for each in own)]
        if len(meant) == 1:
            return meant[0]
    return errors


def _param(location: Sequence[int | str]) -> str | None:
    """Return the field at fault: as deep as fields go, without positions in lists and keys of maps."""
    names: list[str] = []
    for part in location:
        if isinstance(part, int) or not (part.isidentifier() and _is_field(part)):
            break
        names.append(part)
    return ".".join(names)[:MAX_QUOTED] or None


def _dotted(location: Sequence[int | str]) -> str:
    """Return a path such as `messages[0].role`, without pydantic's names of union members."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in location if _is_field(part)]
    return "".join(parts).removeprefix(".")


def _is_field(part: int | str) -> bool:
    if isinstance(part, int):
        return True
    return part.replace("_", "").isalnum() and part not in {"str", "int", "float", "bool"}
