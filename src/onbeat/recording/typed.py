"""Values of declared types from the JSON of a record: files are edited by hand, checked here."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import cache, partial
from math import inf
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from onbeat.core.errors import quoted

MOST = 10**18
"""Beyond any number of tokens or seconds; arithmetic on larger ones overflows."""
INFINITY = "inf"
"""How JSON has what it lacks."""

_Reader = Callable[[Any], Any]
"""Makes a value of one type from what JSON has of it; a `ValueError` says what is wrong."""


def typed(kind: Any, value: Any) -> Any:
    """Return a value of a type from what JSON has of it.

    Parameters
    ----------
    kind : a dataclass, an enumeration, a literal, a union, a sequence, a mapping with texts as keys, or a
        plain type.

    Raises
    ------
    ValueError : it is none of that type; says what it is.
    """
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> _Reader:
    """Return what reads values of a type: a record has a few types and a hundred thousand values."""
    origin, kinds = get_origin(kind), get_args(kind)
    if origin in (types.UnionType, Union):
        return partial(
            _one_of, type(None) in kinds, [_reader(each) for each in kinds if each is not type(None)]
        )
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return partial(_dataclass, kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return partial(_mapping, kind, _reader(kinds[1]))
    if isinstance(origin, type) and issubclass(origin, Sequence):
        if len(kinds) == 1 or kinds[1:] == (...,):
            return partial(_sequence, kind, _reader(kinds[0]))
        return partial(_tuple, kind, [_reader(each) for each in kinds])
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind
    if origin is Literal:
        return partial(_literal, kind)
    return {float: _float, int: _int}.get(kind) or partial(_plain, kind)


def _float(value: Any) -> Any:
    if type(value) in (int, float) and abs(value) < MOST:
        return value
    if value == INFINITY:
        return inf
    raise _is_no(float, value)


def _int(value: Any) -> Any:
    if type(value) is int and abs(value) < MOST:
        return value
    raise _is_no(int, value)


def _literal(kind: Any, value: Any) -> Any:
    if isinstance(value, str | int) and value in get_args(kind):
        return value
    raise _is_no(kind, value)


def _plain(kind: Any, value: Any) -> Any:
    # JSON has hashes as texts, and replicas compare these.
    if kind is Any or type(value) is (str if kind is bytes else kind):
        return value
    raise _is_no(kind, value)


def _is_no(kind: Any, value: Any) -> ValueError:
    return ValueError(f"{quoted(value)} is no {getattr(kind, '__name__', kind)}")


def _one_of(may_be_null: bool, readers: Sequence[_Reader], value: Any) -> Any:  # noqa: FBT001 - bound once
    if value is None and may_be_null:
        return None
    wrong: ValueError | None = None
    for read in readers:
        try:
            return read(value)
        except ValueError as error:
            wrong = error
    raise wrong or ValueError(f"{quoted(value)} is not null")


def _mapping(kind: Any, read: _Reader, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _is_no(kind, value)
    return {key: read(each) for key, each in value.items()}


def _sequence(kind: Any, read: _Reader, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _is_no(kind, value)
    return tuple([read(each) for each in value])


def _tuple(kind: Any, readers: Sequence[_Reader], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _is_no(kind, value)
    if len(readers) != len(value):
        raise ValueError(f"{quoted(value)} has {len(value)} values, not {len(readers)}")
    return tuple([read(each) for read, each in zip(readers, value, strict=True)])


def _dataclass(kind: type, value: Any) -> Any:
    if not isinstance(value, dict):
        raise _is_no(kind, value)
    readers = _fields(kind)
    fields = {}
    for name, each in value.items():
        if name not in readers:
            raise ValueError(f"{kind.__name__} has no {quoted(name)}")
        try:
            fields[name] = readers[name](each)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} lacks a field ({error})") from error


@cache
def _fields(kind: type) -> dict[str, _Reader]:
    return {name: _reader(each) for name, each in get_type_hints(kind).items()}
