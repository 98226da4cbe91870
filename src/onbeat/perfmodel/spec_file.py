"""Fields of a device or an engine as a YAML file holds them, a user's or one of the package."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

from onbeat.core.errors import ConfigError
from onbeat.files import read_yaml

SUFFIXES = (".yaml", ".yml")


def is_spec_file(name: str) -> bool:
    """Return whether a name is that of a file, and not of something in the package."""
    return name.lower().endswith(SUFFIXES)


def read_fields(name: str, what: str) -> Any:
    """Return the content of a file of fields; `check_fields` looks at it.

    Raises
    ------
    ConfigError : it cannot be read.
    """
    return read_yaml(Path(name), f"the {what} in")


def check_fields(entry: Any, where: str, *, needed: Collection[str], others: Collection[str]) -> None:
    """Check which fields there are.

    Raises
    ------
    ConfigError : no mapping, an unknown field (a near one is named), or one that is missing.
    """
    known = (*needed, *others)
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} holds no fields; write some as 'name: value': {', '.join(known)}")
    for name in entry:
        if name not in known:
            near = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(f"{where} has an unknown field {name!r}: {hint}known are {', '.join(known)}")
    if missing := [name for name in needed if name not in entry]:
        raise ConfigError(f"{where} lacks {', '.join(missing)}")


def number(value: Any, where: str) -> float:
    """Return a number of a file; YAML takes 1e-5, without a point, for a text.

    Raises
    ------
    ConfigError : it is none, or not finite.
    """
    try:
        found = float("nan" if isinstance(value, bool) else value)
    except (TypeError, ValueError):
        found = float("nan")
    if not isfinite(found):
        raise ConfigError(f"{where} is {value!r}; it must be a number")
    return found


def positive(value: Any, where: str) -> float:
    """Return a number of a file that is above 0, and no more than any device or engine has.

    Raises
    ------
    ConfigError : it is none.
    """
    found = number(value, where)
    if not 0 < found <= 1e12:
        raise ConfigError(f"{where} is {found:g}; it must be above 0 and at most 1e12")
    return found


def text(value: Any, where: str) -> str:
    """Return a text of a file.

    Raises
    ------
    ConfigError : it is something else.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} is {value!r}; it must be a text")
    return value


def texts(value: Any, where: str) -> Mapping[str, str]:
    """Return a mapping of names to texts of a file.

    Raises
    ------
    ConfigError : it is something else.
    """
    if not isinstance(value, dict):
        raise ConfigError(f"{where} is {value!r}; it must be a mapping of fields to texts")
    return MappingProxyType({str(name): text(each, f"{where}, {name},") for name, each in value.items()})
