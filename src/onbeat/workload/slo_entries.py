"""Entries of YAML files that list classes of objectives: what files of a load and of a server share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onbeat.core.errors import ConfigError, quoted
from onbeat.core.hints import likely_meant
from onbeat.core.slo import SLO, SLO_CLASSES
from onbeat.files import read

OBJECTIVE_KEYS: Mapping[str, str] = {"ttft_ms": "ttft", "tbt_ms": "tbt", "e2e_ms": "e2e"}
"""Key of an entry -> field of `SLO`."""


def read_entries(path: Path) -> Any:
    """Return the content of a file with classes.

    Raises
    ------
    ConfigError : it cannot be read; where a built-in class was probably meant, the message says so.
    """
    near = likely_meant(str(path), SLO_CLASSES)
    return read(Any, path, hint=f"; did you mean the built-in class {near}?" if near else "")


def read_name(entry: Any, known: Sequence[str]) -> str:
    """Return the name of a class, once its keys are known to be right.

    Raises
    ------
    ConfigError : it is no mapping with a name, or has a key that is not in `known`.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise ConfigError(f"a class is a mapping with a name, got {quoted(entry)}")
    name: str = entry["name"]
    if unknown := sorted(map(str, entry.keys() - set(known))):
        raise ConfigError(
            f"class {name!r} has an unknown key {quoted(unknown[0])}; known are {', '.join(known)}"
        )
    return name


def read_objectives(name: str, entry: Mapping[str, Any]) -> SLO:
    """Return the objectives of a class: its own or, where it gives none, those built in for its name.

    Raises
    ------
    ConfigError : an objective is no number or out of range, or there are none.
    """
    given = {
        field: read_number(name, key, entry) / 1e3
        for key, field in OBJECTIVE_KEYS.items()
        if entry.get(key) is not None
    }
    return SLO(**given) if given else built_in_slo(name)


def built_in_slo(name: str) -> SLO:
    """Return the objectives of a built-in class.

    Raises
    ------
    ConfigError : there is none of that name.
    """
    if name not in SLO_CLASSES:
        raise ConfigError(
            f"class {name!r} has no objectives, and none are built in for it (only for "
            f"{', '.join(SLO_CLASSES)}): give {', '.join(OBJECTIVE_KEYS)}"
        )
    return SLO_CLASSES[name]


def read_number(name: str, key: str, entry: Mapping[str, Any], *, default: float | None = None) -> float:
    """Return a number of a class.

    Raises
    ------
    ConfigError : it is something else, such as `true`.
    """
    value = entry.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{key} of class {name!r} must be a number, got {quoted(value)}")
    return float(value)
