"""From the fields of a body to a checked model, with errors that name the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from onbeat.core.errors import InvalidRequest, quoted
from onbeat.server.config import MAX_QUOTED

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
    ignored : gets the names of the fields that the model ignores inside of objects.

    Raises
    ------
    InvalidRequest : a field is missing or wrong.
    """
    try:
        return model.model_validate(fields, context=ignored)
    except ValidationError as error:
        raise _first_error(error) from error


def _first_error(error: ValidationError) -> InvalidRequest:
    first, *others = error.errors(include_url=False)
    location = [part[:MAX_QUOTED] if isinstance(part, str) else part for part in first["loc"]]
    field = _param(location)
    if first["type"] == "missing":
        name = _dotted(location)
        return InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        name = _dotted(location)
        name = name[:MAX_QUOTED]
        return InvalidRequest(f"unknown field {name!r}; leave it out", param=name, code="unknown_parameter")
    if first["type"] == "value_error":
        return InvalidRequest(str(first["ctx"]["error"]), param=field, code="invalid_value")
    if first["type"] == "int_type" and _is_beyond_64_bits(first["input"]):
        return InvalidRequest(
            f"{_dotted(location)} is a number of more than 64 bits; send a smaller one",
            param=field,
            code="invalid_value",
        )
    causes = [part for part in (first, *others) if part["loc"][:1] == first["loc"][:1]]
    reasons = [_JSON_WORDS.get(cause["type"], cause["msg"]) for cause in causes]
    reason = (
        " or ".join(dict.fromkeys(reasons))
        .replace("Input should", "it should")
        .replace("List should", "it should")
    )
    return InvalidRequest(
        f"{_dotted(location)} is {quoted(first['input'])}; {reason}", param=field, code="invalid_value"
    )


def _is_beyond_64_bits(value: object) -> bool:
    """Return whether a number may have been an integer that JSON's reader could only keep as a float."""
    return isinstance(value, float) and abs(value) >= 2**63


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
